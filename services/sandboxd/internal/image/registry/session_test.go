package registry

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry/login"
)

// fetchAll pulls the blobs of an image into a content store and returns the first error.
func fetchAll(t *testing.T, cfg Config, ref string, creds login.Credentials) (content.Store, error) {
	t.Helper()
	store, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		t.Fatal(err)
	}
	ctx, session, err := Open(t.Context(), cfg, named, creds)
	if err != nil {
		return store, err
	}
	defer session.Close()
	root, err := session.Resolve(ctx)
	if err != nil {
		return store, err
	}
	doc, err := session.Document(ctx, root)
	if err != nil {
		return store, err
	}
	for _, d := range append([]ocispec.Descriptor{doc.Manifest.Config}, doc.Manifest.Layers...) {
		if err := session.Blob(ctx, store, d); err != nil {
			return store, err
		}
	}
	return store, nil
}

func tenLayers(t *testing.T) v1.Image {
	t.Helper()
	var layers []v1.Layer
	for i := range 10 {
		layers = append(layers, imagetest.Layer(t, imagetest.File{Name: fmt.Sprint(i), Body: strings.Repeat(fmt.Sprint(i), 9_000)}))
	}
	return imagetest.Image(t, v1.Config{}, layers...)
}

// tokenAuth guards a registry by bearer tokens.
type tokenAuth struct {
	*httptest.Server
	check     func(r *http.Request) bool // of token requests
	uses      int64                      // requests per token; 0 means any number
	life      int64                      // seconds that it says a token lives
	challenge func(realm string) string

	issued  atomic.Int64
	mu      sync.Mutex
	current string
	left    int64
}

func newTokenAuth(t *testing.T, check func(r *http.Request) bool) *tokenAuth {
	t.Helper()
	a := &tokenAuth{check: check, life: 300}
	a.challenge = func(realm string) string {
		return `Bearer realm="` + realm + `",service="reg",scope="repository:app:pull"`
	}
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !a.check(r) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		a.mu.Lock()
		a.current = fmt.Sprint("token", a.issued.Add(1))
		a.left = a.uses
		a.mu.Unlock()
		fmt.Fprintf(w, `{"token":%q,"access_token":%q,"expires_in":%d}`, a.current, a.current, a.life)
	}))
	t.Cleanup(a.Close)
	return a
}

func (a *tokenAuth) fault(w http.ResponseWriter, r *http.Request, next http.Handler) {
	a.mu.Lock()
	good := a.current != "" && r.Header.Get("Authorization") == "Bearer "+a.current
	if good && a.uses > 0 {
		if a.left == 0 {
			good = false
		}
		a.left--
	}
	a.mu.Unlock()
	if !good {
		w.Header().Set("WWW-Authenticate", a.challenge(a.URL+"/token"))
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	next.ServeHTTP(w, r)
}

func TestBearerTokens(t *testing.T) {
	anyone := func(*http.Request) bool { return true }
	password := func(r *http.Request) bool {
		user, secret, ok := r.BasicAuth()
		return ok && r.Method == http.MethodGet && user == "u" && secret == "p:q"
	}
	oauth := func(want map[string]string) func(r *http.Request) bool {
		return func(r *http.Request) bool {
			for k, v := range want {
				if r.Method != http.MethodPost || r.FormValue(k) != v {
					return false
				}
			}
			return true
		}
	}
	tests := map[string]struct {
		creds  login.Credentials
		auth   func(t *testing.T) *tokenAuth
		want   error
		tokens int64
	}{
		"nobody":   {auth: func(t *testing.T) *tokenAuth { t.Helper(); return newTokenAuth(t, anyone) }, tokens: 1},
		"password": {creds: login.Credentials{Username: "u", Secret: "p:q"}, auth: func(t *testing.T) *tokenAuth { t.Helper(); return newTokenAuth(t, password) }, tokens: 1},
		"wrong":    {creds: login.Credentials{Username: "u", Secret: "x"}, auth: func(t *testing.T) *tokenAuth { t.Helper(); return newTokenAuth(t, password) }, want: errdefs.ErrUnauthenticated},
		"identity": {creds: login.Credentials{Secret: "id"}, auth: func(t *testing.T) *tokenAuth {
			t.Helper()
			return newTokenAuth(t, oauth(map[string]string{"grant_type": "refresh_token", "refresh_token": "id"}))
		}, tokens: 1},
		"short-lived":  {auth: func(t *testing.T) *tokenAuth { t.Helper(); a := newTokenAuth(t, anyone); a.uses = 3; return a }, tokens: 5},
		"every second": {auth: func(t *testing.T) *tokenAuth { t.Helper(); a := newTokenAuth(t, anyone); a.uses = 1; return a }, tokens: 13},
		"challenge only at first": {auth: func(t *testing.T) *tokenAuth {
			t.Helper()
			a := newTokenAuth(t, anyone)
			a.uses = 3
			plain := a.challenge
			a.challenge = func(realm string) string {
				if a.issued.Load() > 0 {
					return `Bearer realm="unterminated`
				}
				return plain(realm)
			}
			return a
		}, tokens: 5},
		"several challenges": {auth: func(t *testing.T) *tokenAuth {
			t.Helper()
			a := newTokenAuth(t, anyone)
			plain := a.challenge
			a.challenge = func(realm string) string { return `Basic realm="x", ` + plain(realm) }
			return a
		}, tokens: 1},
		"service fails once": {auth: func(t *testing.T) *tokenAuth {
			t.Helper()
			var n atomic.Int64
			a := newTokenAuth(t, anyone)
			a.Config.Handler = failOnce(&n, a.Config.Handler)
			return a
		}, tokens: 1},
		"token never good": {auth: func(t *testing.T) *tokenAuth { t.Helper(); a := newTokenAuth(t, anyone); a.uses = -1; return a }, want: errdefs.ErrUnauthenticated, tokens: 3},
		"large answer": {auth: answering(func(w io.Writer) {
			_, _ = io.WriteString(w, `{"token":"`)
			_, _ = io.WriteString(w, strings.Repeat("a", 8<<20)+`"}`)
		}), want: errdefs.ErrUnavailable},
		"answer that is no token": {auth: answering(func(w io.Writer) { _, _ = io.WriteString(w, `[]`) }), want: errdefs.ErrUnavailable},
		"token that lives for ever": {auth: func(t *testing.T) *tokenAuth {
			t.Helper()
			a := newTokenAuth(t, anyone)
			a.life = math.MaxInt64
			return a
		}, tokens: 1},
		"malformed only": {auth: func(t *testing.T) *tokenAuth {
			t.Helper()
			a := newTokenAuth(t, anyone)
			a.challenge = func(string) string { return `;;;"` }
			return a
		}, want: errdefs.ErrUnauthenticated},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", tenLayers(t))
			auth := tt.auth(t)
			fault := auth.fault
			if auth.uses < 0 {
				fault = func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
					w.Header().Set("WWW-Authenticate", auth.challenge(auth.URL))
					w.WriteHeader(http.StatusUnauthorized)
				}
			}
			reg.Break(fault)
			_, err := fetchAll(t, Config{}, ref, tt.creds)
			if !errors.Is(err, tt.want) {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			if got := auth.issued.Load(); got > tt.tokens || (err == nil && got == 0) {
				t.Errorf("%d tokens, want at most %d", got, tt.tokens)
			}
			if seen := len(reg.Requests("/")); seen > 40 || (err != nil && seen > 10) {
				t.Errorf("%d requests", seen)
			}
		})
	}
}

// answering makes a token service that answers in its own way.
func answering(write func(io.Writer)) func(t *testing.T) *tokenAuth {
	return func(t *testing.T) *tokenAuth {
		t.Helper()
		a := newTokenAuth(t, nil)
		a.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { write(w) })
		return a
	}
}

func failOnce(n *atomic.Int64, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 1 {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func TestBasicAndRegistryToken(t *testing.T) {
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("u:p:q"))
	tests := map[string]struct {
		creds login.Credentials
		want  error
	}{
		"Basic":        {creds: login.Credentials{Username: "u", Secret: "p:q"}},
		"Basic wrong":  {creds: login.Credentials{Username: "u", Secret: "p"}, want: errdefs.ErrUnauthenticated},
		"Bearer":       {creds: login.Credentials{Token: "t"}},
		"Bearer wrong": {creds: login.Credentials{Token: "x"}, want: errdefs.ErrUnauthenticated},
		"other server": {creds: login.Credentials{Username: "u", Secret: "p:q", Server: "other.example"}, want: errdefs.ErrUnauthenticated},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", tenLayers(t))
			reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				if got := r.Header.Get("Authorization"); got != basic && got != "Bearer t" {
					w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				next.ServeHTTP(w, r)
			})
			if _, err := fetchAll(t, Config{}, ref, tt.creds); !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
			if seen := len(reg.Requests("/")); tt.want != nil && seen > 6 {
				t.Errorf("%d requests", seen)
			}
		})
	}
}

// TestSecretsStayHome follows a redirect of blobs to another port of the same machine and a
// mirror: neither may see a proof or a configured header.
func TestSecretsStayHome(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	img := tenLayers(t)
	ref := reg.Push(t, "app:1", img)
	cdn, mirror := imagetest.NewRegistry(t), imagetest.NewRegistry(t)
	cdn.Push(t, "app:1", img)
	mirror.Break(imagetest.Status("/", -1, http.StatusNotFound, nil))
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		switch {
		case r.Header.Get("Authorization") == "":
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		case strings.Contains(r.URL.Path, "/blobs/"):
			http.Redirect(w, r, "http://"+cdn.Host+r.URL.Path, http.StatusTemporaryRedirect)
		default:
			next.ServeHTTP(w, r)
		}
	})
	cdn.Break(nil)
	dir := t.TempDir()
	hosts := filepath.Join(dir, strings.ReplaceAll(reg.Host, ":", "_")+"_")
	if err := os.MkdirAll(hosts, 0o755); err != nil {
		t.Fatal(err)
	}
	toml := fmt.Sprintf("server = \"http://%s\"\n[host.\"http://%s\"]\ncapabilities = [\"pull\", \"resolve\"]\n[host.\"http://%s\"]\ncapabilities = [\"pull\", \"resolve\"]\n[host.\"http://%s\".header]\nX-Key = \"secret\"\n", reg.Host, mirror.Host, reg.Host, reg.Host)
	if err := os.WriteFile(filepath.Join(hosts, "hosts.toml"), []byte(toml), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := fetchAll(t, Config{HostDirs: []string{"/nonexistent", dir}}, ref, login.Credentials{Username: "u", Secret: "p"}); err != nil {
		t.Fatal(err)
	}
	if len(mirror.Requests("/")) == 0 || len(cdn.Requests("/")) == 0 {
		t.Error("mirror or redirect not used")
	}
	for name, other := range map[string]*imagetest.Registry{"mirror": mirror, "cdn": cdn} {
		for _, r := range other.Requests("/") {
			if r.Header.Get("Authorization") != "" || r.Header.Get("X-Key") != "" {
				t.Errorf("%s saw %v", name, r.Header)
			}
		}
	}
	if got := reg.Requests("/manifests/")[0].Header.Get("X-Key"); got != "secret" {
		t.Errorf("configured header is %q", got)
	}
}

func TestBrokenHostConfiguration(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "r.example"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "r.example", "hosts.toml"), []byte("not toml"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := fetchAll(t, Config{HostDirs: []string{dir}}, "r.example/app", login.Credentials{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("error %v", err)
	}
}

func TestHeadRefused(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	ref := reg.Push(t, "app:1", tenLayers(t))
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodHead || r.Header.Get("Authorization") == "" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
	if _, err := fetchAll(t, Config{}, ref, login.Credentials{Username: "u", Secret: "p"}); err != nil {
		t.Error(err)
	}
}

// TestResume checks what happens when a body breaks off and the server treats ranges in its
// own way.
func TestResume(t *testing.T) {
	img := tenLayers(t)
	layers, _ := img.Layers()
	layer, _ := layers[4].Digest()
	raw := func(r *http.Request, next http.Handler) []byte {
		plain := r.Clone(context.Background())
		plain.Header.Del("Range")
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, plain)
		return rec.Body.Bytes()
	}
	tests := map[string]func(w http.ResponseWriter, r *http.Request, body []byte){
		"range ignored": func(w http.ResponseWriter, _ *http.Request, body []byte) {
			_, _ = w.Write(body)
		},
		"wrong offset": func(w http.ResponseWriter, r *http.Request, body []byte) {
			if r.Header.Get("Range") == "" {
				_, _ = w.Write(body)
				return
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(body)-1, len(body)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(body)
		},
		"not satisfiable": func(w http.ResponseWriter, r *http.Request, body []byte) {
			if r.Header.Get("Range") == "" {
				_, _ = w.Write(body)
				return
			}
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		},
	}
	for name, answer := range tests {
		for _, chunked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/chunked=%v", name, chunked), func(t *testing.T) {
				reg := imagetest.NewRegistry(t)
				ref := reg.Push(t, "app:1", img)
				var seen atomic.Int64
				reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
					if !strings.Contains(r.URL.Path, layer.String()) {
						next.ServeHTTP(w, r)
						return
					}
					body := raw(r, next)
					if seen.Add(1) > 1 {
						answer(w, r, body)
						return
					}
					if !chunked {
						w.Header().Set("Content-Length", fmt.Sprint(len(body)))
					}
					_, _ = w.Write(body[:len(body)*6/10])
					_ = http.NewResponseController(w).Flush()
					panic(http.ErrAbortHandler)
				})
				store, err := fetchAll(t, Config{}, ref, login.Credentials{})
				if err != nil {
					t.Fatal(err)
				}
				if left, err := store.ListStatuses(t.Context()); err != nil || len(left) > 0 {
					t.Errorf("partial data left: %v %v", left, err)
				}
			})
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	for value, want := range map[string]time.Duration{
		"7":          7 * time.Second,
		"-1":         0,
		"9223372037": 9223372036 * time.Second, // the most that a time can be
		now.Add(3 * time.Second).UTC().Format(http.TimeFormat): 3 * time.Second,
	} {
		if got, ok := retryAfter(http.Header{"Retry-After": {value}}, now); !ok || got != want {
			t.Errorf("%q: %v %v", value, got, ok)
		}
	}
	if _, ok := retryAfter(http.Header{"Retry-After": {"soon"}}, now); ok {
		t.Error("nonsense was understood")
	}
	reg := imagetest.NewRegistry(t)
	ref := reg.Push(t, "app:1", tenLayers(t))
	reg.Break(imagetest.Status("/manifests/", 2, http.StatusTooManyRequests, http.Header{"Retry-After": {"1"}}))
	start := time.Now()
	if _, err := fetchAll(t, Config{}, ref, login.Credentials{}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 2*time.Second {
		t.Errorf("the pauses that were asked for were not kept: %v", took)
	}
	reg.Break(imagetest.Status("/manifests/", -1, http.StatusTooManyRequests, http.Header{"Retry-After": {"3600"}}))
	if _, err := fetchAll(t, Config{}, ref, login.Credentials{}); !errdefs.IsUnavailable(err) {
		t.Errorf("error %v", err)
	}
}

func TestUnreachable(t *testing.T) {
	if _, err := fetchAll(t, Config{}, "127.0.0.1:1/app", login.Credentials{}); !errdefs.IsUnavailable(err) {
		t.Errorf("error %v", err)
	}
}
