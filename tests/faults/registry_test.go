//go:build integration

package faults

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

// fault answers a request in the registry's place, or passes it on.
type fault func(w http.ResponseWriter, r *http.Request, next http.Handler)

// badRegistry is a registry that can be told to misbehave.
type badRegistry struct {
	*fixture.Registry

	t *testing.T

	mu    sync.Mutex // mu guards the rest
	fault fault
	seen  []*http.Request
}

// withBadRegistry starts a system that has no mirrors, and a registry.
func withBadRegistry(t *testing.T, setup testenv.Setup) (*system, *badRegistry) {
	t.Helper()
	s := start(t, setup)
	must(t, os.RemoveAll(s.Path("hosts", "_default")))
	b := &badRegistry{t: t}
	var err error
	b.Registry, err = fixture.Serve(t.Context(), fixture.Config{Front: b.front}, nil)
	must(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return s, b
}

func (b *badRegistry) front(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		fault := b.fault
		b.seen = append(b.seen, r.Clone(r.Context()))
		b.mu.Unlock()
		if fault == nil {
			next.ServeHTTP(w, r)
			return
		}
		fault(w, r, next)
	})
}

// bend makes it misbehave from now on; nil repairs it. The requests so far are forgotten.
func (b *badRegistry) bend(f fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fault, b.seen = f, nil
}

// asked gives the requests since then whose path contains part.
func (b *badRegistry) asked(part string) (found []*http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.seen {
		if strings.Contains(r.URL.Path, part) {
			found = append(found, r)
		}
	}
	return found
}

// add serves an image and gives its full name.
func (b *badRegistry) add(name string, image v1.Image) string {
	b.t.Helper()
	full := b.Addr() + "/" + name
	must(b.t, b.Add(b.t.Context(), fixture.Image{Name: full, Plain: image}))
	return full
}

// on bends only what concerns a part of the paths.
func on(part string, f fault) fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, part) {
			f(w, r, next)
			return
		}
		next.ServeHTTP(w, r)
	}
}

func refuse(code int) fault {
	return func(w http.ResponseWriter, _ *http.Request, _ http.Handler) { http.Error(w, "broken", code) }
}

// rewrite changes the bodies of answers.
func rewrite(change func([]byte) []byte) fault {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		answer := whole(r, next)
		maps.Copy(w.Header(), answer.Header())
		body := answer.Body.Bytes()
		if r.Method == http.MethodGet {
			body = change(bytes.Clone(body))
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		}
		w.WriteHeader(answer.Code)
		_, _ = w.Write(body)
	}
}

// whole is the answer to a request without a range.
func whole(r *http.Request, next http.Handler) *httptest.ResponseRecorder {
	plain := r.Clone(r.Context())
	plain.Header.Del("Range")
	answer := httptest.NewRecorder()
	next.ServeHTTP(answer, plain)
	return answer
}

// ranges serves blobs with ranges of any form.
func ranges(w http.ResponseWriter, r *http.Request, next http.Handler) {
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(whole(r, next).Body.Bytes()))
}

// cut sends a part of the body and breaks the connection.
func cut(w http.ResponseWriter, body []byte, n int) {
	w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	_, _ = w.Write(body[:n])
	_ = http.NewResponseController(w).Flush()
	panic(http.ErrAbortHandler)
}

// item is one entry of a layer.
type item struct {
	name, body, link string
	kind             byte
	mode             int64
}

// pack makes the content of a layer.
func pack(t *testing.T, items ...item) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, i := range items {
		h := &tar.Header{Name: i.name, Linkname: i.link, Typeflag: i.kind, Mode: i.mode, Size: int64(len(i.body))}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		must(t, w.WriteHeader(h))
		_, err := w.Write([]byte(i.body))
		must(t, err)
	}
	must(t, w.Close())
	return buf.Bytes()
}

func layer(t *testing.T, items ...item) v1.Layer {
	t.Helper()
	return tarLayer(t, pack(t, items...))
}

// tarLayer is a layer with that content.
func tarLayer(t *testing.T, data []byte) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	must(t, err)
	return l
}

// noise is a layer with a file of that many bytes that cannot be compressed.
func noise(t *testing.T, name string, size int) v1.Layer {
	t.Helper()
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	return layer(t, item{name: name, body: string(data)})
}

// rawLayer is a layer of any bytes that claims to be the content of another.
type rawLayer struct {
	v1.Layer

	data []byte
}

func (l rawLayer) Digest() (v1.Hash, error) {
	h, _, err := v1.SHA256(bytes.NewReader(l.data))
	return h, err
}
func (l rawLayer) Size() (int64, error) { return int64(len(l.data)), nil }
func (l rawLayer) Compressed() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(l.data)), nil
}
func (l rawLayer) MediaType() (types.MediaType, error) { return types.DockerLayer, nil }

// onBusybox puts layers on the busybox image, so that the result can be run.
func onBusybox(t *testing.T, layers ...v1.Layer) v1.Image {
	t.Helper()
	all, err := images()
	must(t, err)
	at := slices.IndexFunc(all, func(i fixture.Image) bool { return i.Name == busybox })
	image := all[at].Plain
	if image == nil {
		manifest, err := all[at].Index.IndexManifest()
		must(t, err)
		for _, m := range manifest.Manifests {
			if m.Platform != nil && m.Platform.Architecture == "amd64" {
				image, err = all[at].Index.Image(m.Digest)
				must(t, err)
			}
		}
	}
	image, err = mutate.AppendLayers(image, layers...)
	must(t, err)
	return image
}

func digestOf(t *testing.T, l v1.Layer) string {
	t.Helper()
	h, err := l.Digest()
	must(t, err)
	return h.String()
}

func (s *system) tryPull(image string, auth *criv1.AuthConfig) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	answer, err := s.Images.PullImage(ctx, &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: image}, Auth: auth})
	return answer.GetImageRef(), err
}

func (s *system) present(image string) bool {
	s.t.Helper()
	answer, err := s.Images.ImageStatus(s.t.Context(), &criv1.ImageStatusRequest{Image: &criv1.ImageSpec{Image: image}})
	must(s.t, err)
	return answer.GetImage() != nil
}

func (s *system) removeImage(image string) {
	s.t.Helper()
	_, err := s.Images.RemoveImage(s.t.Context(), &criv1.RemoveImageRequest{Image: &criv1.ImageSpec{Image: image}})
	must(s.t, err)
}

// runs runs a script in a container of an image and gives its exit code.
func (s *system) runs(image, name, text string) int32 {
	s.t.Helper()
	pod := s.podConfig(name)
	id := s.pod(pod, "")
	config := script("main", text)
	config.Image.Image = image
	code := s.waitExit(s.container(id, pod, config), patience).GetExitCode()
	must(s.t, s.stopPod(id))
	must(s.t, s.removePod(id))
	return code
}

// Tokens that live shorter than the pull are renewed, with credentials of every form.
func TestTokensExpireInThePull(t *testing.T) {
	s, reg := withBadRegistry(t, testenv.Setup{})
	var layers []v1.Layer
	for i := range 10 {
		layers = append(layers, noise(t, fmt.Sprint("file", i), 1000))
	}
	image := reg.add("app:1", onBusybox(t, layers...))
	const password = "se:cret"
	type issue struct {
		token string
		left  int
		until time.Time
	}
	var mu sync.Mutex
	var now issue
	var issued atomic.Int64
	guard := func(check func(r *http.Request) bool) fault {
		issued.Store(0)
		now = issue{}
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			mu.Lock()
			if r.URL.Path == "/token" {
				defer mu.Unlock()
				if !check(r) {
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				now = issue{fmt.Sprint("token", issued.Add(1)), 4, time.Now().Add(time.Second)}
				w.Header().Set("Content-Type", "application/json")
				_, _ = fmt.Fprintf(w, `{"token":%[1]q,"access_token":%[1]q}`, now.token)
				return
			}
			good := now.left > 0 && time.Now().Before(now.until) && r.Header.Get("Authorization") == "Bearer "+now.token
			now.left--
			mu.Unlock()
			if !good {
				w.Header().Add("WWW-Authenticate", `Negotiate`)
				w.Header().Add("WWW-Authenticate", fmt.Sprintf(`Digest realm="x, y", Bearer realm="http://%s/token",service="s,t",scope="repository:app:pull"`, r.Host))
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			if strings.Contains(r.URL.Path, "/blobs/") {
				time.Sleep(100 * time.Millisecond)
			}
			next.ServeHTTP(w, r)
		}
	}
	byPassword := func(r *http.Request) bool {
		user, secret, ok := r.BasicAuth()
		return (ok && user == "me" && secret == password) ||
			(r.PostFormValue("username") == "me" && r.PostFormValue("password") == password)
	}
	encoded := base64.StdEncoding.EncodeToString([]byte("me:" + password + "\x00\x00"))
	for name, tt := range map[string]struct {
		auth  *criv1.AuthConfig
		check func(r *http.Request) bool
	}{
		"nobody":         {nil, func(r *http.Request) bool { return r.Header.Get("Authorization") == "" }},
		"user":           {&criv1.AuthConfig{Username: "me", Password: password}, byPassword},
		"with server":    {&criv1.AuthConfig{Username: "me", Password: password, ServerAddress: "http://" + reg.Addr() + "/v2/"}, byPassword},
		"auth":           {&criv1.AuthConfig{Auth: encoded}, byPassword},
		"identity token": {&criv1.AuthConfig{IdentityToken: "idt"}, func(r *http.Request) bool { return r.PostFormValue("refresh_token") == "idt" }},
	} {
		t.Run(name, func(t *testing.T) {
			reg.bend(guard(tt.check))
			if _, err := s.tryPull(image, tt.auth); err != nil {
				t.Fatal(err)
			}
			if issued.Load() < 3 {
				t.Errorf("%d tokens for the pull", issued.Load())
			}
			s.removeImage(image)
		})
	}
	t.Run("registry token", func(t *testing.T) {
		reg.bend(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.Header.Get("Authorization") != "Bearer rt" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, r)
		})
		if _, err := s.tryPull(image, &criv1.AuthConfig{RegistryToken: "rt"}); err != nil {
			t.Fatal(err)
		}
		s.removeImage(image)
	})
	for name, tt := range map[string]struct {
		fault fault
		auth  *criv1.AuthConfig
	}{
		"wrong password": {guard(byPassword), &criv1.AuthConfig{Username: "me", Password: "wrong"}},
		"other server":   {guard(byPassword), &criv1.AuthConfig{Username: "me", Password: password, ServerAddress: "elsewhere.example"}},
		"always 401":     {refuse(http.StatusUnauthorized), &criv1.AuthConfig{Username: "me", Password: password}},
		"always a challenge": {func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.URL.Path == "/token" {
				guard(byPassword)(w, r, next)
				return
			}
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token"`, r.Host))
			w.WriteHeader(http.StatusUnauthorized)
		}, &criv1.AuthConfig{Username: "me", Password: password}},
	} {
		t.Run(name, func(t *testing.T) {
			reg.bend(tt.fault)
			if _, err := s.tryPull(image, tt.auth); status.Code(err) != codes.Unauthenticated || strings.Contains(err.Error(), password) {
				t.Errorf("pull: %v", err)
			}
			if n := len(reg.asked("/")); n > 12 {
				t.Errorf("%d requests", n)
			}
		})
	}
}

// Wrong bytes are refused, and do not stand in the way of a later pull.
func TestWrongBytesAreRefused(t *testing.T) {
	s, reg := withBadRegistry(t, testenv.Setup{})
	shared := noise(t, "shared", 300_000)
	image := onBusybox(t, shared, noise(t, "own", 1000))
	other := reg.add("other:1", onBusybox(t, shared, noise(t, "other", 1000)))
	config, err := image.ConfigName()
	must(t, err)
	manifest, err := image.Digest()
	must(t, err)
	ref := reg.add("app:1", image)
	byDigest := reg.Addr() + "/app@" + manifest.String()
	flip := rewrite(func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
	lie := func(size int) fault {
		return rewrite(func(b []byte) []byte {
			l, _ := shared.Size()
			return bytes.Replace(b, fmt.Appendf(nil, `"size":%d`, l), fmt.Appendf(nil, `"size":%d`, size), 1)
		})
	}
	for name, tt := range map[string]struct {
		ref   string
		fault fault
	}{
		"layer":                   {ref, on(digestOf(t, shared), flip)},
		"configuration":           {ref, on(config.String(), flip)},
		"manifest by digest":      {byDigest, on("/manifests/", rewrite(func(b []byte) []byte { return append(b[:len(b)-1], ' ') }))},
		"layer longer than said":  {ref, on(digestOf(t, shared), rewrite(func(b []byte) []byte { return append(b, "more"...) }))},
		"size smaller by digest":  {byDigest, on("/manifests/", lie(100))},
		"size larger by digest":   {byDigest, on("/manifests/", lie(400_000))},
		"size negative by digest": {byDigest, on("/manifests/", lie(-7))},
	} {
		t.Run(name, func(t *testing.T) {
			reg.bend(tt.fault)
			if _, err := s.tryPull(tt.ref, nil); !oneOf(err, codes.DataLoss, codes.InvalidArgument) {
				t.Errorf("pull: %v", err)
			}
			if s.present(tt.ref) {
				t.Error("the image is shown")
			}
			reg.bend(nil)
			var wg sync.WaitGroup
			for _, ref := range []string{tt.ref, other} {
				wg.Go(func() {
					if _, err := s.tryPull(ref, nil); err != nil {
						t.Errorf("pull of %s after the repair: %v", ref, err)
					}
				})
			}
			wg.Wait()
			if code := s.runs(tt.ref, "runs", "test -s /shared -a -s /own"); code != 0 {
				t.Errorf("exit code %d", code)
			}
			s.removeImage(tt.ref)
			s.removeImage(other)
		})
	}
}

// Bodies that break off are gone on with, also after the end of the process; answers to
// ranges that are no such are not put together.
func TestBodiesBreakOff(t *testing.T) {
	s, reg := withBadRegistry(t, testenv.Setup{})
	big := noise(t, "big", 4<<20)
	dgst := digestOf(t, big)
	size, err := big.Size()
	must(t, err)
	ref := reg.add("app:1", onBusybox(t, big))
	var count atomic.Int64
	breaks := func(times int64, then fault) fault {
		count.Store(0)
		return on(dgst, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if count.Add(1) <= times {
				body := whole(r, next).Body.Bytes()
				cut(w, body, len(body)*6/10)
			}
			then(w, r, next)
		})
	}
	ignore := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		_, _ = w.Write(whole(r, next).Body.Bytes())
	}
	onlyRange := func(f fault) fault {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.Header.Get("Range") == "" {
				ignore(w, r, next)
				return
			}
			f(w, r, next)
		}
	}
	for name, f := range map[string]fault{
		"honours ranges, once":   breaks(1, ranges),
		"honours ranges, thrice": breaks(3, ranges),
		"ignores ranges":         breaks(1, ignore),
		"answers 416":            breaks(1, onlyRange(refuse(http.StatusRequestedRangeNotSatisfiable))),
		"has another offset": breaks(1, onlyRange(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			body := whole(r, next).Body.Bytes()
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(body)-1, len(body)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(body)
		})),
	} {
		t.Run(name, func(t *testing.T) {
			reg.bend(f)
			if _, err := s.tryPull(ref, nil); err != nil {
				t.Fatal(err)
			}
			s.removeImage(ref)
		})
	}
	t.Run("always", func(t *testing.T) {
		reg.bend(on(dgst, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.Header.Get("Range") != "" {
				panic(http.ErrAbortHandler)
			}
			body := whole(r, next).Body.Bytes()
			cut(w, body, len(body)*6/10)
		}))
		_, err := s.tryPull(ref, nil)
		// kubelet looks for its reason in errors without a code only.
		if status.Code(err) != codes.Unknown || !strings.HasPrefix(status.Convert(err).Message(), "RegistryUnavailable") || s.present(ref) {
			t.Errorf("pull: %v, present %v", err, s.present(ref))
		}
		reg.bend(on("/blobs/", ranges))
		if _, err := s.tryPull(ref, nil); err != nil {
			t.Fatal(err)
		}
		s.removeImage(ref)
	})
	for _, hard := range []bool{true, false} {
		t.Run(fmt.Sprintf("restart, killed=%v", hard), func(t *testing.T) {
			sent := make(chan struct{})
			var once sync.Once
			reg.bend(on(dgst, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				body := whole(r, next).Body.Bytes()
				w.Header().Set("Content-Length", fmt.Sprint(len(body)))
				_, _ = w.Write(body[:len(body)*6/10])
				_ = http.NewResponseController(w).Flush()
				once.Do(func() { close(sent) })
				<-r.Context().Done()
			}))
			done := make(chan error, 1)
			go func() {
				_, err := s.tryPull(ref, nil)
				done <- err
			}()
			select {
			case <-sent:
			case err := <-done:
				t.Fatalf("the pull ended: %v", err)
			}
			time.Sleep(time.Second) // what was sent is written
			if hard {
				must(t, s.Kill(t.Context(), testenv.Sandboxd))
			} else {
				must(t, s.Stop(t.Context(), testenv.Sandboxd))
			}
			if err := <-done; err == nil {
				t.Error("the interrupted pull succeeded")
			}
			reg.bend(on("/blobs/", ranges))
			must(t, s.Run(testenv.Sandboxd))
			must(t, s.WaitReady(t.Context()))
			if s.present(ref) {
				t.Error("half an image is shown")
			}
			if _, err := s.tryPull(ref, nil); err != nil {
				t.Fatal(err)
			}
			asked := reg.asked(dgst)
			var from int64
			_, _ = fmt.Sscanf(asked[0].Header.Get("Range"), "bytes=%d-", &from)
			if from < size/3 {
				t.Errorf("after the restart the layer was fetched from %d of %d on", from, size)
			}
			if code := s.runs(ref, "again", "test -s /big"); code != 0 {
				t.Errorf("exit code %d", code)
			}
			s.removeImage(ref)
		})
	}
}

// A blob is not taken for the manifest when the server fails, and odd content types do no harm.
func TestServerFailsOnTheManifest(t *testing.T) {
	s, reg := withBadRegistry(t, testenv.Setup{})
	image := onBusybox(t, noise(t, "own", 1000))
	manifest, err := image.Digest()
	must(t, err)
	raw, err := image.RawManifest()
	must(t, err)
	tagged := reg.add("app:1", image)
	ref := reg.Addr() + "/app@" + manifest.String()
	reg.bend(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		switch {
		case strings.Contains(r.URL.Path, "/manifests/"):
			http.Error(w, "down for maintenance", http.StatusInternalServerError)
		case strings.HasSuffix(r.URL.Path, "/blobs/"+manifest.String()):
			w.Header().Set("Content-Type", "application/octet-stream")
			_, _ = w.Write(raw)
		default:
			next.ServeHTTP(w, r)
		}
	})
	if _, err := s.tryPull(ref, nil); err == nil || !strings.HasPrefix(status.Convert(err).Message(), "RegistryUnavailable") || !strings.Contains(err.Error(), "500") {
		t.Errorf("pull: %v", err)
	}
	if s.present(ref) {
		t.Error("the image is shown")
	}
	reg.bend(nil)
	if _, err := s.tryPull(ref, nil); err != nil {
		t.Fatal(err)
	}
	if code := s.runs(ref, "runs", "test -s /own"); code != 0 {
		t.Errorf("exit code %d", code)
	}
	s.removeImage(ref)
	typed := func(kind string, digest bool) fault {
		return on("/manifests/", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			answer := whole(r, next)
			maps.Copy(w.Header(), answer.Header())
			w.Header()["Content-Type"] = nil
			if kind != "" {
				w.Header().Set("Content-Type", kind)
			}
			if !digest {
				w.Header().Del("Docker-Content-Digest")
			}
			w.WriteHeader(answer.Code)
			_, _ = w.Write(answer.Body.Bytes())
		})
	}
	for _, kind := range []string{"application/json", "text/plain", "", "application/octet-stream"} {
		for _, digest := range []bool{true, false} {
			reg.bend(typed(kind, digest))
			if _, err := s.tryPull(tagged, nil); err != nil {
				t.Errorf("type %q, digest %v: %v", kind, digest, err)
			}
			s.removeImage(tagged)
		}
	}
	for _, kind := range []string{string(types.OCIImageIndex), "text/html"} {
		reg.bend(typed(kind, true))
		if _, err := s.tryPull(tagged, nil); err == nil || s.present(tagged) {
			t.Errorf("type %q: %v, present %v", kind, err, s.present(tagged))
		}
	}
}

// A layer that cannot be unpacked fails the pull, at whatever moment it arrives.
func TestBrokenLayerFailsThePull(t *testing.T) {
	s, reg := withBadRegistry(t, testenv.Setup{})
	good := layer(t, item{name: "third", body: strings.Repeat("good", 5000)})
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	content := pack(t, item{name: "third", body: strings.Repeat("good", 5000)})
	_, err := w.Write(content)
	must(t, err)
	must(t, w.Close())
	var half bytes.Buffer
	w = gzip.NewWriter(&half)
	_, err = w.Write(content[:len(content)/2])
	must(t, err)
	must(t, w.Close())
	trailer := bytes.Clone(packed.Bytes())
	for i := range 8 {
		trailer[len(trailer)-1-i] ^= 0x5a
	}
	around := func(third v1.Layer) v1.Image {
		var all []v1.Layer
		for i := range 8 {
			l := layer(t, item{name: fmt.Sprint("f", i), body: strings.Repeat("x", 2000)})
			if i == 2 {
				l = third
			}
			all = append(all, l)
		}
		return onBusybox(t, all...)
	}
	for name, data := range map[string][]byte{"gzip trailer": trailer, "tar cut": half.Bytes(), "gzip cut": packed.Bytes()[:packed.Len()/2]} {
		t.Run(name, func(t *testing.T) {
			for round := range scaled(t, 4) {
				ref := reg.add("app:1", around(rawLayer{good, data}))
				reg.bend(on("/blobs/", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
					time.Sleep(rand.N(30 * time.Millisecond))
					next.ServeHTTP(w, r)
				}))
				if _, err := s.tryPull(ref, nil); status.Code(err) != codes.DataLoss {
					t.Fatalf("round %d: %v", round, err)
				}
				if s.present(ref) {
					t.Fatal("the image is shown")
				}
				pod := s.podConfig("none")
				id := s.pod(pod, "")
				config := script("main", "true")
				config.Image.Image = ref
				if _, err := s.create(id, pod, config); status.Code(err) != codes.NotFound {
					t.Errorf("create: %v", err)
				}
				must(t, s.removePod(id))
				reg.add("app:1", around(good))
				if _, err := s.tryPull(ref, nil); err != nil {
					t.Fatal(err)
				}
				if code := s.runs(ref, "whole", "test -s /third -a -s /f7"); code != 0 {
					t.Errorf("exit code %d", code)
				}
				s.removeImage(ref)
			}
		})
	}
}

// ofImages are the blobs, whole or in part, and the snapshots that sandboxd has.
func (s *system) ofImages() []string {
	s.t.Helper()
	var found []string
	for _, pattern := range []string{"content/blobs/*/*", "content/ingest/*", "*/snapshots/*"} {
		list, err := filepath.Glob(s.Path("lib", "images", pattern))
		must(s.t, err)
		found = append(found, list...)
	}
	return found
}

// What interrupted pulls have brought is no burden for ever: a pull that its caller gives up leaves
// nothing, and what is kept for the next attempt when sandboxd is stopped or killed goes when space is wanted.
func TestGarbageOfInterruptedPulls(t *testing.T) {
	s, reg := withBadRegistry(t, testenv.Setup{})
	big := noise(t, "big", 4<<20)
	ref := reg.add("app:1", onBusybox(t, noise(t, "first", 100_000), big))
	other := reg.add("other:1", onBusybox(t, noise(t, "other", 1000)))
	before, snapshots := s.ofImages(), s.Path("lib", "images", "*/snapshots/*")
	had, err := filepath.Glob(snapshots)
	must(t, err)
	for name, interrupt := range map[string]func(cancel func()){
		"cancelled": func(cancel func()) { cancel() },
		"stopped":   func(func()) { must(t, s.Stop(t.Context(), testenv.Sandboxd)) },
		"killed":    func(func()) { must(t, s.Kill(t.Context(), testenv.Sandboxd)) },
	} {
		t.Run(name, func(t *testing.T) {
			sent := make(chan struct{}, 10)
			reg.bend(on(digestOf(t, big), func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				body := whole(r, next).Body.Bytes()
				w.Header().Set("Content-Length", fmt.Sprint(len(body)))
				_, _ = w.Write(body[:len(body)/2])
				_ = http.NewResponseController(w).Flush()
				sent <- struct{}{}
				<-r.Context().Done()
			}))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() {
				_, err := s.Images.PullImage(ctx, &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: ref}})
				done <- err
			}()
			<-sent
			eventually(t, patience, "a layer is extracted, another one begun", func() error {
				layers, _ := filepath.Glob(snapshots)
				begun, _ := filepath.Glob(s.Path("lib", "images", "content/ingest/*"))
				if len(layers) <= len(had) || len(begun) == 0 {
					return fmt.Errorf("layers %v, begun %v", layers, begun)
				}
				return nil
			})
			interrupt(cancel)
			if err := <-done; err == nil {
				t.Error("the interrupted pull succeeded")
			}
			reg.bend(nil)
			if name != "cancelled" {
				must(t, s.Run(testenv.Sandboxd))
				must(t, s.WaitReady(t.Context()))
				if len(s.ofImages()) <= len(before) {
					t.Error("nothing is kept for the next attempt")
				}
				if _, err := s.tryPull(other, nil); err != nil {
					t.Fatal(err)
				}
				s.removeImage(other)
			}
			eventually(t, patience, "nothing of the pull is left", func() error {
				if left := s.ofImages(); !slices.Equal(left, before) {
					return fmt.Errorf("there are %v, before it were %v", left, before)
				}
				return nil
			})
			if s.present(ref) {
				t.Error("half an image is shown")
			}
		})
	}
}
