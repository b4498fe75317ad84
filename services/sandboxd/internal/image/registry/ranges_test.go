package registry

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry/login"
)

const testRange = 256 << 10

var inRanges = Config{RangeSize: testRange, MaxConcurrentDownloads: 3}

// bigBlob is a layer of ten and a half ranges.
func bigBlob(t *testing.T) (v1.Layer, ocispec.Descriptor, []byte) {
	t.Helper()
	data := make([]byte, testRange*21/2)
	_, _ = rand.Read(data)
	desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromBytes(data), Size: int64(len(data))}
	return static.NewLayer(data, types.OCIUncompressedLayer), desc, data
}

func openSession(t *testing.T, cfg Config, ref string) *Session {
	t.Helper()
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		t.Fatal(err)
	}
	_, session, err := Open(t.Context(), cfg, named, login.Credentials{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(session.Close)
	return session
}

func newStore(t *testing.T) content.Store {
	t.Helper()
	store, err := local.NewStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// TestBigBlobInRanges checks that the ranges of a big blob are under way side by side, no
// more than are allowed at a time, and that the bytes are in order.
func TestBigBlobInRanges(t *testing.T) {
	layer, desc, data := bigBlob(t)
	reg := imagetest.NewRegistry(t)
	ref := reg.Push(t, "app:1", imagetest.Image(t, v1.Config{}, layer))
	var now, most atomic.Int64
	together := make(chan struct{})
	var once sync.Once
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, desc.Digest.String()) {
			next.ServeHTTP(w, r)
			return
		}
		n := now.Add(1)
		defer now.Add(-1)
		for old := most.Load(); n > old; old = most.Load() {
			if most.CompareAndSwap(old, n) {
				break
			}
		}
		body := imagetest.Whole(r, next)
		if strings.HasPrefix(r.Header.Get("Range"), "bytes=0-") {
			// Its end is held back until a second request has come.
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(body)-1, len(body)))
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(body[:100])
			_ = http.NewResponseController(w).Flush()
			select {
			case <-together:
			case <-r.Context().Done():
			}
			_, _ = w.Write(body[100:])
			return
		}
		once.Do(func() { close(together) })
		imagetest.ServeRanges(w, r, body)
	})
	store := newStore(t)
	if err := openSession(t, inRanges, ref).Blob(t.Context(), store, desc); err != nil {
		t.Fatal(err)
	}
	got, err := content.ReadBlob(t.Context(), store, desc)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if most.Load() < 2 || most.Load() > 4 { // the server may see one end after the next begins
		t.Errorf("%d requests at a time", most.Load())
	}
}

// TestRangesFallBack checks that a blob arrives whatever a server thinks of ranges, and of
// several requests at a time.
func TestRangesFallBack(t *testing.T) {
	layer, desc, data := bigBlob(t)
	first := func(r *http.Request) bool {
		return r.Header.Get("Range") == "" || strings.HasPrefix(r.Header.Get("Range"), "bytes=0-")
	}
	partial := func(w http.ResponseWriter, from, to int) {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to-1, len(data)))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(data[from:to])
	}
	var at atomic.Int64
	tests := map[string]func(w http.ResponseWriter, r *http.Request){
		"honoured": func(w http.ResponseWriter, r *http.Request) { imagetest.ServeRanges(w, r, data) },
		"ignored":  func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(data) },
		"unknown length": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(data[:1])
			_ = http.NewResponseController(w).Flush()
			_, _ = w.Write(data[1:])
		},
		"ignored later": func(w http.ResponseWriter, r *http.Request) {
			if first(r) {
				imagetest.ServeRanges(w, r, data)
			} else {
				_, _ = w.Write(data)
			}
		},
		"not satisfiable": func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			} else {
				_, _ = w.Write(data)
			}
		},
		"other ranges": func(w http.ResponseWriter, r *http.Request) {
			if first(r) {
				imagetest.ServeRanges(w, r, data)
			} else {
				partial(w, 7, testRange)
			}
		},
		"shorter ranges": func(w http.ResponseWriter, r *http.Request) {
			if first(r) {
				imagetest.ServeRanges(w, r, data)
			} else {
				var from int
				_, _ = fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &from)
				partial(w, from, min(from+testRange/2, len(data)))
			}
		},
		"forbidden": func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusForbidden)
			} else {
				_, _ = w.Write(data)
			}
		},
		"one at a time": func(w http.ResponseWriter, r *http.Request) {
			if at.Add(1) > 1 {
				at.Add(-1)
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			defer at.Add(-1)
			// Long enough for others to come.
			time.Sleep(50 * time.Millisecond)
			imagetest.ServeRanges(w, r, data)
		},
		"connections break": func(w http.ResponseWriter, r *http.Request) {
			if at.Add(1)%3 == 0 {
				panic(http.ErrAbortHandler)
			}
			imagetest.ServeRanges(w, r, data)
		},
	}
	for name, answer := range tests {
		t.Run(name, func(t *testing.T) {
			at.Store(0)
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", imagetest.Image(t, v1.Config{}, layer))
			reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				if strings.Contains(r.URL.Path, desc.Digest.String()) {
					answer(w, r)
					return
				}
				next.ServeHTTP(w, r)
			})
			store := newStore(t)
			if err := openSession(t, inRanges, ref).Blob(t.Context(), store, desc); err != nil {
				t.Fatal(err)
			}
			if got, err := content.ReadBlob(t.Context(), store, desc); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			if seen := len(reg.Requests(desc.Digest.String())); seen > 40 {
				t.Errorf("%d requests", seen)
			}
		})
	}
}

// TestOneBlobInRangesAtATime checks the bound on memory.
func TestOneBlobInRangesAtATime(t *testing.T) {
	s := openSession(t, inRanges, "127.0.0.1:1/app")
	big := ocispec.Descriptor{Size: 3 * testRange}
	if s.takeRanges(ocispec.Descriptor{Size: big.Size - 1}) {
		t.Error("a small blob is fetched in ranges")
	}
	if !s.takeRanges(big) || s.takeRanges(big) {
		t.Error("not exactly one is")
	}
	s.giveRanges(true)
	if !s.takeRanges(big) {
		t.Error("the next one is not")
	}
}

// TestBlobGoesOn checks that a second session goes on where the first one stopped, also with
// a registry that knows no ranges without an end, and throws bytes away that were bad.
func TestBlobGoesOn(t *testing.T) {
	layer, desc, data := bigBlob(t)
	half := len(data) / 2
	for name, tt := range map[string]struct {
		cfg  Config
		have []byte
		want string
	}{
		"whole":     {have: data[:half], want: fmt.Sprintf("bytes=%d-%d", half, len(data)-1)},
		"in ranges": {cfg: inRanges, have: data[:half], want: fmt.Sprintf("bytes=%d-%d", half, len(data)-1)},
		"bad bytes": {have: make([]byte, half), want: ""},
	} {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", imagetest.Image(t, v1.Config{}, layer))
			store := newStore(t)
			w, err := content.OpenWriter(t.Context(), store, content.WithRef(remotes.MakeRefKey(t.Context(), desc)), content.WithDescriptor(desc))
			if err != nil {
				t.Fatal(err)
			}
			_, err = w.Write(tt.have)
			if err != nil || w.Close() != nil {
				t.Fatal(err)
			}
			reg.Break(nil)
			if err := openSession(t, tt.cfg, ref).Blob(t.Context(), store, desc); err != nil {
				t.Fatal(err)
			}
			if got, err := content.ReadBlob(t.Context(), store, desc); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			requests := reg.Requests(desc.Digest.String())
			var seen []string
			for _, r := range requests {
				seen = append(seen, r.Header.Get("Range"))
			}
			if name == "bad bytes" {
				if len(seen) != 2 || seen[1] != "" {
					t.Errorf("ranges asked for: %q", seen)
				}
				return
			}
			if seen[0] != tt.want {
				t.Errorf("ranges asked for: %q, want %q", seen, tt.want)
			}
		})
	}
}

// TestPartialBlobs checks what stays of a blob that could not be completed: what a later
// pull can use, and nothing else.
func TestPartialBlobs(t *testing.T) {
	layer, desc, _ := bigBlob(t)
	for name, tt := range map[string]struct {
		fault imagetest.Fault
		want  bool
	}{
		"connection breaks": {imagetest.Truncate(desc.Digest.String(), -1), true},
		"server fails later": {func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			imagetest.Truncate(desc.Digest.String(), -1)(w, r, next)
		}, true},
		"wrong bytes": {imagetest.Rewrite(desc.Digest.String(), func(b []byte) []byte { b[7] ^= 1; return b }), false},
		"too many":    {imagetest.Rewrite(desc.Digest.String(), func(b []byte) []byte { return append(b, 'x') }), false},
	} {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", imagetest.Image(t, v1.Config{}, layer))
			reg.Break(tt.fault)
			store := newStore(t)
			if err := openSession(t, Config{}, ref).Blob(t.Context(), store, desc); err == nil {
				t.Fatal("the blob arrived")
			}
			left, err := store.ListStatuses(t.Context())
			if err != nil || (len(left) == 1 && left[0].Offset > 0) != tt.want {
				t.Errorf("partial data: %v %v", left, err)
			}
		})
	}
}
