// Package imagetest makes images and an image registry that can be told to misbehave. It is
// for tests only.
package imagetest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Registry is an image registry on the loopback interface, over plain HTTP.
type Registry struct {
	// Host is its address, to be used as the first part of image names.
	Host string

	inner http.Handler

	mu       sync.Mutex // mu guards the rest
	fault    Fault
	requests []*http.Request
}

// Fault handles a request in the registry's place, or passes it on to next.
type Fault func(w http.ResponseWriter, r *http.Request, next http.Handler)

// NewRegistry starts a registry that ends with the test.
func NewRegistry(tb testing.TB) *Registry {
	tb.Helper()
	r := &Registry{inner: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	server := httptest.NewUnstartedServer(http.HandlerFunc(r.serve))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Start()
	tb.Cleanup(server.Close)
	r.Host = strings.TrimPrefix(server.URL, "http://")
	return r
}

func (r *Registry) serve(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	fault := r.fault
	r.requests = append(r.requests, req.Clone(req.Context()))
	r.mu.Unlock()
	if fault != nil {
		fault(w, req, r.inner)
		return
	}
	r.inner.ServeHTTP(w, req)
}

// Break makes the registry misbehave from now on; nil repairs it. Requests seen so far are
// forgotten.
func (r *Registry) Break(f Fault) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fault, r.requests = f, nil
}

// Requests returns the requests since the last Break whose path contains part.
func (r *Registry) Requests(part string) []*http.Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*http.Request
	for _, req := range r.requests {
		if strings.Contains(req.URL.Path, part) {
			out = append(out, req)
		}
	}
	return out
}

// Push stores an image under a name below the registry and returns the full name.
func (r *Registry) Push(tb testing.TB, repo string, img remote.Taggable) string {
	tb.Helper()
	ref, err := name.ParseReference(r.Host + "/" + repo)
	if err != nil {
		tb.Fatal(err)
	}
	switch img := img.(type) {
	case v1.Image:
		err = remote.Write(ref, img)
	case v1.ImageIndex:
		err = remote.WriteIndex(ref, img)
	default:
		err = remote.Put(ref, img)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return ref.Name()
}

// File is an entry of a layer. A zero Type is a regular file.
type File struct {
	Name string
	Body string
	Link string
	Type byte
	Mode int64
	UID  int
}

// Layer makes a compressed layer.
func Layer(tb testing.TB, files ...File) v1.Layer {
	tb.Helper()
	return gzipped{static.NewLayer(Compress(tb, Tar(tb, files...)), types.OCILayer)}
}

// Tar makes the content of a layer.
func Tar(tb testing.TB, files ...File) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{
			Name: f.Name, Linkname: f.Link, Typeflag: f.Type, Mode: f.Mode, Uid: f.UID,
			Size: int64(len(f.Body)), ModTime: time.Unix(1_700_000_000, 0),
		}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if err := w.WriteHeader(h); err != nil {
			tb.Fatal(err)
		}
		if _, err := w.Write([]byte(f.Body)); err != nil {
			tb.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

// Compress makes a gzip stream.
func Compress(tb testing.TB, data []byte) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	if _, err := w.Write(data); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

// Image makes an image for linux/amd64 of layers.
func Image(tb testing.TB, config v1.Config, layers ...v1.Layer) v1.Image {
	tb.Helper()
	img := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	var adds []mutate.Addendum
	for _, l := range layers {
		adds = append(adds, mutate.Addendum{Layer: l})
	}
	img, err := mutate.Append(img, adds...)
	if err != nil {
		tb.Fatal(err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		tb.Fatal(err)
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", "amd64", config
	if img, err = mutate.ConfigFile(img, file); err != nil {
		tb.Fatal(err)
	}
	return img
}

// gzipped gives a static layer the digest of its uncompressed content.
type gzipped struct{ v1.Layer }

// DiffID returns the digest of the uncompressed content; that of the compressed one if it
// cannot be uncompressed.
func (l gzipped) DiffID() (v1.Hash, error) {
	r, err := l.Uncompressed()
	if err != nil {
		return v1.Hash{}, err
	}
	defer r.Close()
	h, _, err := v1.SHA256(r)
	return h, err
}

// Uncompressed returns the uncompressed content.
func (l gzipped) Uncompressed() (io.ReadCloser, error) {
	r, err := l.Compressed()
	if err != nil {
		return nil, err
	}
	return gzip.NewReader(r)
}

// MediaType returns the type of a compressed layer.
func (l gzipped) MediaType() (types.MediaType, error) { return types.OCILayer, nil }
