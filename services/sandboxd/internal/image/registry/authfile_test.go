package registry

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry/login"
)

func writeAuthFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "auth.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
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
		creds login.Credentials
		want  error
	}{
		"none":            {ref: ref},
		"own":             {ref: ref, creds: login.Credentials{Username: "u", Secret: "wrong"}, want: errdefs.ErrUnauthenticated},
		"other namespace": {ref: strings.Replace(ref, "/team/", "/other/", 1), want: errdefs.ErrUnauthenticated},
	} {
		if _, err := fetchAll(t, cfg, tt.ref, tt.creds); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
	if _, err := fetchAll(t, Config{AuthFile: writeAuthFile(t, "nonsense")}, ref, login.Credentials{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("broken file: %v", err)
	}
}
