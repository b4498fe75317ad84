package login

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func writeAuthFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "auth.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAuthFile(t *testing.T) {
	path := writeAuthFile(t, `{"auths": {
		"https://index.docker.io/v1/": {"auth": "`+base64.StdEncoding.EncodeToString([]byte("hub:h:1"))+`"},
		"quay.example": {"username": "all", "password": "p"},
		"quay.example/team": {"identitytoken": "idt"},
		"quay.example/team/app": {"registrytoken": "rt"},
		"local:5000": {}
	}, "credsStore": "x"}`)
	f, err := ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]Credentials{
		"registry-1.docker.io library/x": {Username: "hub", Secret: "h:1"},
		"quay.example other/app":         {Username: "all", Secret: "p"},
		"quay.example teams/app":         {Username: "all", Secret: "p"},
		"quay.example team/other":        {Secret: "idt"},
		"quay.example team/app":          {Token: "rt"},
		"quay.example team/app/x":        {Token: "rt"},
		"local:5000 x":                   {},
		"example team/app":               {},
	} {
		host, repo, _ := strings.Cut(name, " ")
		if got := f.For(host, repo); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
	for name, text := range map[string]string{"JSON": `{`, "base64": `{"auths":{"x":{"auth":"!secret!"}}}`} {
		bad := writeAuthFile(t, text)
		if _, err := ReadFile(bad); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), bad) || strings.Contains(err.Error(), "secret") {
			t.Errorf("bad %s: %v", name, err)
		}
	}
	if f, err := ReadFile("/nonexistent/auth.json"); f != nil || err != nil {
		t.Errorf("no file: %v %v", f, err)
	}
}
