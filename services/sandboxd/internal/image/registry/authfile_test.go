package registry

import (
	"encoding/base64"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
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
	f, err := readAuthFile(path)
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
		if _, err := readAuthFile(bad); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), bad) || strings.Contains(err.Error(), "secret") {
			t.Errorf("bad %s: %v", name, err)
		}
	}
	if f, err := readAuthFile("/nonexistent/auth.json"); f != nil || err != nil {
		t.Errorf("no file: %v %v", f, err)
	}
}

// TestAuthFileIsUsed checks that the credentials of the file are for those who bring none.
func TestAuthFileIsUsed(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	ref := reg.Push(t, "team/app:1", tenLayers(t))
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if user, password, _ := r.BasicAuth(); user != "u" || password != "p" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
	cfg := Config{AuthFile: writeAuthFile(t, `{"auths":{"`+reg.Host+`/team":{"username":"u","password":"p"}}}`)}
	for name, tt := range map[string]struct {
		ref   string
		creds Credentials
		want  error
	}{
		"none":            {ref: ref},
		"own":             {ref: ref, creds: Credentials{Username: "u", Secret: "wrong"}, want: errdefs.ErrUnauthenticated},
		"other namespace": {ref: strings.Replace(ref, "/team/", "/other/", 1), want: errdefs.ErrUnauthenticated},
	} {
		if _, err := fetchAll(t, cfg, tt.ref, tt.creds); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := fetchAll(t, Config{AuthFile: writeAuthFile(t, "nonsense")}, ref, Credentials{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("broken file: %v", err)
	}
}
