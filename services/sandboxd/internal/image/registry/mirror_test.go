package registry

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry/login"
)

// writeHosts writes the host configuration of example.test.
func writeHosts(t *testing.T, text string) Config {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "example.test"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "example.test", "hosts.toml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return Config{HostDirs: []string{dir}}
}

// TestBadMirrors checks that whatever is wrong with a mirror, the image comes from the
// registry itself, soon, and that the mirror is not asked again and again.
func TestBadMirrors(t *testing.T) {
	img := tenLayers(t)
	layers, _ := img.Layers()
	layer, _ := layers[4].Digest()
	hang := func(r *http.Request) { <-r.Context().Done() }
	tests := map[string]imagetest.Fault{
		"knows nothing":  imagetest.Status("/", -1, http.StatusNotFound, nil),
		"fails":          imagetest.Status("/", -1, http.StatusInternalServerError, nil),
		"is busy":        imagetest.Status("/", -1, http.StatusTooManyRequests, http.Header{"Retry-After": {"25"}}),
		"wants a login":  imagetest.Status("/", -1, http.StatusUnauthorized, http.Header{"WWW-Authenticate": {`Basic realm="x"`}}),
		"drops out":      imagetest.Hangup("/", -1),
		"has no layer":   imagetest.Status(layer.String(), -1, http.StatusNotFound, nil),
		"changes layers": imagetest.Rewrite("/blobs/", func(b []byte) []byte { b[len(b)/2] ^= 1; return b }),
		"cuts layers":    imagetest.Rewrite("/blobs/", func(b []byte) []byte { return b[:len(b)/2] }),
		"breaks off":     imagetest.Truncate(layer.String(), -1),
		"changes manifests": func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.Method == http.MethodGet {
				imagetest.Rewrite("/manifests/", func(b []byte) []byte { return append(b[:len(b)-1], ' ') })(w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		},
		"shows a web page": func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = w.Write([]byte("<html>Please log in</html>"))
		},
		"redirects in circles": func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
		},
		"hangs": func(_ http.ResponseWriter, r *http.Request, _ http.Handler) { hang(r) },
		"hangs in layers": func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if !strings.Contains(r.URL.Path, "/blobs/") {
				next.ServeHTTP(w, r)
				return
			}
			body := imagetest.Whole(r, next)
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			_, _ = w.Write(body[:len(body)/2])
			_ = http.NewResponseController(w).Flush()
			hang(r)
		},
		"has a token service that hangs": func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			if r.URL.Path == "/token" {
				hang(r)
				return
			}
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token"`, r.Host))
			w.WriteHeader(http.StatusUnauthorized)
		},
	}
	for name, fault := range tests {
		t.Run(name, func(t *testing.T) {
			origin, mirror := imagetest.NewRegistry(t), imagetest.NewRegistry(t)
			origin.Push(t, "app:1", img)
			mirror.Push(t, "app:1", img)
			origin.Break(nil)
			mirror.Break(fault)
			cfg := writeHosts(t, fmt.Sprintf("server = \"http://%s\"\n[host.\"http://%s\"]\n", origin.Host, mirror.Host))
			cfg.MirrorPatience = 250 * time.Millisecond
			start := time.Now()
			if _, err := fetchAll(t, cfg, "example.test/app:1", login.Credentials{}); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > testkit.Patience {
				t.Errorf("took %v", took)
			}
			if seen := len(mirror.Requests("/")); seen == 0 || seen > 150 {
				t.Errorf("%d requests to the mirror", seen)
			}
			if strings.HasPrefix(name, "hangs") && len(mirror.Requests("/blobs/")) > 3 {
				t.Errorf("a mirror that hangs was asked for %d blobs", len(mirror.Requests("/blobs/")))
			}
		})
	}
}

// TestBadRegistry checks what the last host's nonsense ends in.
func TestBadRegistry(t *testing.T) {
	for name, tt := range map[string]struct {
		fault imagetest.Fault
		ok    bool
	}{
		"web page": {fault: func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = w.Write([]byte("<html>"))
		}},
		"redirect loop": {fault: func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Redirect(w, r, r.URL.Path, http.StatusFound)
		}},
		// The length of an answer to HEAD says nothing about the manifest.
		"wrong length": {ok: true, fault: func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.Method == http.MethodHead {
				imagetest.Header("/manifests/", "Content-Length", "0")(w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", tenLayers(t))
			reg.Break(tt.fault)
			_, err := fetchAll(t, Config{}, ref, login.Credentials{})
			if tt.ok != (err == nil) || (err != nil && !errdefs.IsUnavailable(Classify(err))) {
				t.Errorf("error %v", err)
			}
			if seen := len(reg.Requests("/")); seen > 70 {
				t.Errorf("%d requests", seen)
			}
		})
	}
}

// TestHostConfiguration goes through what a hosts.toml can say.
func TestHostConfiguration(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	reg.Push(t, "team/app:1", tenLayers(t))
	ca, client := clientCertificate(t)
	var last atomic.Pointer[http.Request]
	serve := func(w http.ResponseWriter, r *http.Request) {
		last.Store(r.Clone(r.Context()))
		r.URL.Path = strings.Replace(r.URL.Path, "/odd/place/", "/v2/", 1)
		httpProxy(w, r, reg.Host)
	}
	secure := httptest.NewUnstartedServer(http.HandlerFunc(serve))
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.TLS = &tls.Config{ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: ca}
	secure.StartTLS()
	t.Cleanup(secure.Close)
	dir := t.TempDir()
	server := filepath.Join(dir, "ca.pem")
	writePEM(t, server, "CERTIFICATE", secure.Certificate().Raw)
	cert, key := filepath.Join(dir, "client.cert"), filepath.Join(dir, "client.key")
	writePEM(t, cert, "CERTIFICATE", client.Certificate[0])
	der, err := x509.MarshalPKCS8PrivateKey(client.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, key, "PRIVATE KEY", der)

	for name, tt := range map[string]struct {
		text  string
		bad   bool
		check func(r *http.Request) bool
	}{
		"unknown authority":  {text: "server = %q\n", bad: true},
		"authority":          {text: "server = %q\nca = \"" + server + "\"\n"},
		"unchecked":          {text: "server = %q\nskip_verify = true\n"},
		"client certificate": {text: "server = %q\nca = \"" + server + "\"\nclient = [[\"" + cert + "\", \"" + key + "\"]]\n", check: func(r *http.Request) bool { return len(r.TLS.PeerCertificates) == 1 }},
		"headers": {text: "server = %q\nskip_verify = true\n[header]\n\"X-One\" = \"1\"\n\"X-Two\" = [\"2\", \"3\"]\n", check: func(r *http.Request) bool {
			return r.Header.Get("X-One") == "1" && len(r.Header.Values("X-Two")) == 2
		}},
		"path":            {text: "server = \"%s/odd/place\"\nskip_verify = true\noverride_path = true\n", check: func(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/odd/place/team/app/") }},
		"dial timeout":    {text: "server = %q\nskip_verify = true\ndial_timeout = \"1s\"\n"},
		"may not resolve": {text: "server = %q\nskip_verify = true\ncapabilities = [\"pull\"]\n", bad: true},
		"plain HTTP":      {text: "server = \"http://" + reg.Host + "\"\n#%s\n"},
	} {
		t.Run(name, func(t *testing.T) {
			last.Store(nil)
			cfg := writeHosts(t, fmt.Sprintf(tt.text, secure.URL))
			_, err := fetchAll(t, cfg, "example.test/team/app:1", login.Credentials{})
			if (err != nil) != tt.bad {
				t.Fatalf("error %v", err)
			}
			if tt.check != nil && (last.Load() == nil || !tt.check(last.Load())) {
				t.Errorf("request %+v", last.Load())
			}
		})
	}
	t.Run("mirror that may not resolve", func(t *testing.T) {
		mirror := imagetest.NewRegistry(t)
		mirror.Push(t, "team/app:1", tenLayers(t))
		mirror.Break(nil)
		cfg := writeHosts(t, fmt.Sprintf("server = \"http://%s\"\n[host.\"http://%s\"]\ncapabilities = [\"pull\"]\n", reg.Host, mirror.Host))
		if _, err := fetchAll(t, cfg, "example.test/team/app:1", login.Credentials{}); err != nil {
			t.Fatal(err)
		}
		for _, r := range mirror.Requests("/manifests/1") {
			t.Errorf("the mirror was asked what a tag means: %s", r.URL)
		}
		if got := mirror.Requests("/blobs/"); len(got) != 11 || got[0].URL.Query().Get("ns") != "example.test" {
			t.Errorf("%d requests for blobs", len(got))
		}
	})
}

// httpProxy passes a request on.
func httpProxy(w http.ResponseWriter, r *http.Request, host string) {
	req, err := http.NewRequestWithContext(r.Context(), r.Method, "http://"+host+r.URL.Path, nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	req.Header = r.Header.Clone()
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	maps.Copy(w.Header(), resp.Header)
	w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(w, resp.Body)
}

func clientCertificate(t *testing.T) (*x509.CertPool, tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "node"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return pool, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func writePEM(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}
