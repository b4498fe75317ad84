//go:build integration

package image

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace/noop"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/assembly"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/progress"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/verify"
)

// node is an image service on a fresh storage.
type node struct {
	*Service
	t    *testing.T
	root string
	st   *storage.Storage
	// change is what the node is configured with, also when it is opened again.
	change func(*Config, *storage.Config)

	mu     sync.Mutex
	users  []string
	events []string
	steps  []*eventv1.ImageProgress
}

func newNode(t *testing.T, change func(*Config, *storage.Config)) *node {
	t.Helper()
	n := &node{t: t, root: t.TempDir()}
	n.open(change)
	t.Cleanup(n.close)
	return n
}

// reopen closes the storage and opens it again.
func (n *node) reopen() {
	n.t.Helper()
	n.close()
	n.open(nil)
}

func (n *node) open(change func(*Config, *storage.Config)) {
	n.t.Helper()
	if change != nil {
		n.change = change
	}
	sc := storage.Config{Root: n.root}
	cfg := Config{OnChange: func(_ context.Context, topic string, event any) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if step, ok := event.(*eventv1.ImageProgress); ok {
			n.steps = append(n.steps, step)
			return
		}
		n.events = append(n.events, topic)
	}}
	if n.change != nil {
		n.change(&cfg, &sc)
	}
	st, err := storage.Open(n.t.Context(), sc, testLog(n.t))
	if err != nil {
		n.t.Fatal(err)
	}
	n.st = st
	n.Service = New(cfg, st, testLog(n.t), noop.NewTracerProvider().Tracer(""), func(context.Context, string) []string {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.users
	})
	if err := n.Load(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) close() {
	n.Close()
	if err := n.st.Close(); err != nil {
		n.t.Error(err)
	}
}

func (n *node) pull(ref string) (string, error) {
	return n.Pull(n.t.Context(), &criv1.ImageSpec{Image: ref}, nil, nil)
}

func (n *node) mustPull(ref string) string {
	n.t.Helper()
	id, err := n.pull(ref)
	if err != nil {
		n.t.Fatalf("pull %s: %v", ref, err)
	}
	return id
}

func (n *node) present(ref string) bool {
	n.t.Helper()
	img, _, err := n.Status(n.t.Context(), &criv1.ImageSpec{Image: ref}, false)
	if err != nil {
		n.t.Fatal(err)
	}
	return img != nil
}

// read returns a file of an image as a container would see it.
func (n *node) read(ref, file string) string {
	n.t.Helper()
	img, err := n.Resolve(n.t.Context(), ref)
	if err != nil {
		n.t.Fatal(err)
	}
	sn, _, err := n.st.Snapshotter(img.Snapshotter)
	if err != nil {
		n.t.Fatal(err)
	}
	ctx := n.st.Context(n.t.Context())
	key := "read-" + digest.FromString(ref+file).Encoded()
	mounts, err := sn.Prepare(ctx, key, img.ChainID)
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = sn.Remove(ctx, key) }()
	var data []byte
	err = mount.WithTempMount(ctx, mounts, func(root string) error {
		data, err = os.ReadFile(filepath.Join(root, file))
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return string(data)
}

// leftovers counts what is on disk: blobs, partial blobs and layers.
func (n *node) leftovers() (blobs, ingests, layers int) {
	n.t.Helper()
	count := func(pattern string) int {
		found, err := filepath.Glob(filepath.Join(n.root, pattern))
		if err != nil {
			n.t.Fatal(err)
		}
		return len(found)
	}
	return count("content/blobs/sha256/*"), count("content/ingest/*"), count("*/snapshots/*")
}

func (n *node) wantEmpty() {
	n.t.Helper()
	if b, i, l := n.leftovers(); b+i+l != 0 {
		n.t.Errorf("left on disk: %d blobs, %d partial blobs, %d layers", b, i, l)
	}
}

// wantGivenUp checks that nothing is left but what is kept for the next attempt.
func (n *node) wantGivenUp() {
	n.t.Helper()
	ctx := n.st.Context(n.t.Context())
	if err := errors.Join(n.st.DropKept(ctx), n.st.Collect(ctx)); err != nil {
		n.t.Error(err)
	}
	n.wantEmpty()
}

func someImage(t *testing.T, mark string) v1.Image {
	t.Helper()
	return imagetest.Image(t, v1.Config{User: "1000:1000", Env: []string{"A=b"}},
		imagetest.Layer(t, imagetest.File{Name: "etc/", Type: '5'}, imagetest.File{Name: "etc/mark", Body: "lower"}, imagetest.File{Name: "gone", Body: "x"}),
		imagetest.Layer(t, imagetest.File{Name: "etc/mark", Body: mark}, imagetest.File{Name: ".wh.gone"}),
		imagetest.Layer(t, imagetest.File{Name: "big", Body: strings.Repeat(mark+"0123456789", 30_000)}))
}

func TestPullFromIndex(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	n := newNode(t, func(c *Config, _ *storage.Config) { c.PinnedImages = []string{"*/team/*:v1"} })
	img := someImage(t, "right")
	foreign := imagetest.Image(t, v1.Config{}, imagetest.Layer(t, imagetest.File{Name: "foreign", Body: "x"}))
	attestation := imagetest.Image(t, v1.Config{}, imagetest.Layer(t, imagetest.File{Name: "att", Body: "x"}))
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: foreign, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: attestation, Descriptor: v1.Descriptor{
			Platform:    &v1.Platform{OS: "unknown", Architecture: "unknown"},
			Annotations: map[string]string{"vnd.docker.reference.type": "attestation-manifest"},
		}},
		mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}},
	)
	ref := reg.Push(t, "team/app:v1", index)
	id := n.mustPull(ref)

	config, _ := img.ConfigName()
	if id != config.String() {
		t.Errorf("id is %s, want the configuration's digest %s", id, config)
	}
	root, _ := index.Digest()
	byDigest := reg.Host + "/team/app@" + root.String()
	for _, q := range []string{ref, byDigest, ref + "@" + root.String(), id, strings.TrimPrefix(id, "sha256:"), strings.TrimPrefix(id, "sha256:")[:12], root.String()} {
		got, _, err := n.Status(t.Context(), &criv1.ImageSpec{Image: q}, false)
		if err != nil || got.GetId() != id {
			t.Errorf("status of %q: %v, %v", q, got.GetId(), err)
		}
	}
	got, info, err := n.Status(t.Context(), &criv1.ImageSpec{Image: id}, true)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.GetRepoTags(), []string{ref}) || !slices.Equal(got.GetRepoDigests(), []string{byDigest}) {
		t.Errorf("names: %v %v", got.GetRepoTags(), got.GetRepoDigests())
	}
	if got.GetUid().GetValue() != 1000 || got.GetUsername() != "" || !got.GetPinned() || got.GetSize() == 0 {
		t.Errorf("image: %v", got)
	}
	if !strings.Contains(info["info"], "chainID") {
		t.Errorf("verbose: %v", info)
	}
	if got := n.read(ref, "etc/mark"); got != "right" {
		t.Errorf("etc/mark is %q", got)
	}
	if want := []string{"/images/create", "/images/create", "/images/create"}; !slices.Equal(n.events, want) {
		t.Errorf("events: %v", n.events)
	}
	n.mustPull(ref)
	if len(n.events) != 3 {
		t.Errorf("a pull that changed nothing was told of: %v", n.events)
	}

	images, containers, err := n.Usage(t.Context())
	if err != nil || len(images) != 1 || len(containers) != 1 || images[0].GetUsedBytes().GetValue() < 300_000 {
		t.Errorf("usage: %v %v %v", images, containers, err)
	}

	n.mu.Lock()
	n.users = []string{"c1"}
	n.mu.Unlock()
	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("removal of a used image: %v", err)
	}
	n.mu.Lock()
	n.users = nil
	n.mu.Unlock()
	for range 2 {
		if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
			t.Error(err)
		}
	}
	if n.present(id) {
		t.Error("the image is still there")
	}
	n.wantEmpty()
}

func TestPullOtherForms(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	n := newNode(t, nil)
	img := someImage(t, "one")
	ref := reg.Push(t, "app:one", img)
	d, _ := img.Digest()
	byDigest := reg.Host + "/app@" + d.String()
	id := n.mustPull(byDigest)
	if got, _, _ := n.Status(t.Context(), &criv1.ImageSpec{Image: id}, false); len(got.GetRepoTags()) != 0 {
		t.Errorf("tags of an image pulled by digest: %v", got.GetRepoTags())
	}
	if got := n.mustPull(ref + "@" + d.String()); got != id {
		t.Errorf("id by tag and digest is %s", got)
	}
	if n.mustPull(ref) != id {
		t.Error("id by tag differs")
	}
	// The tag moves on; the old image stays without it.
	reg.Push(t, "app:one", someImage(t, "two"))
	if n.mustPull(ref) == id {
		t.Error("the tag still means the old image")
	}
	if got := n.read(ref, "etc/mark"); got != "two" {
		t.Errorf("etc/mark is %q", got)
	}
	old, _, _ := n.Status(t.Context(), &criv1.ImageSpec{Image: id}, false)
	if old == nil || len(old.GetRepoTags()) != 0 {
		t.Errorf("old image: %v", old)
	}
	list, err := n.List(t.Context(), nil)
	if err != nil || len(list) != 2 || list[0].GetId() > list[1].GetId() {
		t.Errorf("list: %v %v", list, err)
	}
	list, err = n.List(t.Context(), &criv1.ImageFilter{Image: &criv1.ImageSpec{Image: ref}})
	if err != nil || len(list) != 1 {
		t.Errorf("filtered list: %v %v", list, err)
	}
	// Everything is found again after a restart.
	n.reopen()
	if !n.present(ref) || !n.present(id) {
		t.Error("images lost by a restart")
	}
	if got := n.read(ref, "etc/mark"); got != "two" {
		t.Errorf("etc/mark is %q after a restart", got)
	}
	// Layers that are the same, and one without a byte.
	same := imagetest.Layer(t, imagetest.File{Name: "twice", Body: "x"})
	nothing := static.NewLayer(nil, types.OCIUncompressedLayer)
	odd := reg.Push(t, "odd:1", imagetest.Image(t, v1.Config{}, same, nothing, same, imagetest.Layer(t, imagetest.File{Name: "top", Body: "top"})))
	n.mustPull(odd)
	if got := n.read(odd, "twice") + n.read(odd, "top"); got != "xtop" {
		t.Errorf("files of an image with a layer twice: %q", got)
	}
	// An image without layers.
	bare := reg.Push(t, "bare:1", imagetest.Image(t, v1.Config{User: "web"}))
	n.mustPull(bare)
	got, err := n.Resolve(t.Context(), bare)
	if err != nil || got.ChainID != "" || got.Name != bare {
		t.Errorf("image without layers: %+v %v", got, err)
	}
}

// TestPullFaults checks that a fault ends in the right kind of error, that nothing is left of
// the attempt, and that the pull works when the registry does.
func TestPullFaults(t *testing.T) {
	img := someImage(t, "x")
	layers, _ := img.Layers()
	layer, _ := layers[2].Digest()
	config, _ := img.ConfigName()
	manifest, _ := img.Digest()
	flip := func(part string) imagetest.Fault {
		return imagetest.Rewrite(part, func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
	}
	plainText := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		// Without the digest the library looks at the type.
		imagetest.Header("/manifests/", "Content-Type", "text/plain; charset=utf-8")(w, r, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			imagetest.Header("/manifests/", "Docker-Content-Digest", "")(w, r, next)
		}))
	}
	tests := map[string]struct {
		fault imagetest.Fault
		want  error // nil: the pull works all the same
	}{
		"flipped byte in a layer":        {flip(layer.String()), errdefs.ErrDataLoss},
		"flipped byte in the config":     {flip(config.String()), errdefs.ErrDataLoss},
		"flipped byte in manifest":       {imagetest.Rewrite("/manifests/", func(b []byte) []byte { return append(b[:len(b)-1], ' ') }), errdefs.ErrDataLoss},
		"lying digest header":            {imagetest.Header("/manifests/", "Docker-Content-Digest", digest.FromString("lie").String()), errdefs.ErrNotFound},
		"truncated once":                 {imagetest.Truncate(layer.String(), 1), nil},
		"truncated thrice":               {imagetest.Truncate(layer.String(), 3), nil},
		"truncated always":               {imagetest.Truncate(layer.String(), -1), errdefs.ErrUnavailable},
		"surplus bytes":                  {imagetest.Rewrite(layer.String(), func(b []byte) []byte { return append(b, "surplus"...) }), errdefs.ErrDataLoss},
		"missing layer":                  {imagetest.Status(layer.String(), -1, http.StatusNotFound, nil), errdefs.ErrNotFound},
		"missing manifest":               {imagetest.Status("/manifests/", -1, http.StatusNotFound, nil), errdefs.ErrNotFound},
		"server error once":              {imagetest.Status("/manifests/", 1, http.StatusInternalServerError, nil), nil},
		"server error always":            {imagetest.Status(layer.String(), -1, http.StatusInternalServerError, nil), errdefs.ErrUnavailable},
		"too many requests":              {imagetest.Status("/", 1, http.StatusTooManyRequests, http.Header{"Retry-After": {"0"}}), nil},
		"forbidden":                      {imagetest.Status("/manifests/", -1, http.StatusForbidden, nil), errdefs.ErrPermissionDenied},
		"login wanted":                   {imagetest.Status("/", -1, http.StatusUnauthorized, http.Header{"WWW-Authenticate": {`Basic realm="x"`}}), errdefs.ErrUnauthenticated},
		"plain text":                     {plainText, nil},
		"odd content type":               {imagetest.Header("/manifests/", "Content-Type", "application/json"), nil},
		"no content type":                {imagetest.Header("/manifests/", "Content-Type", ""), nil},
		"contradicting type":             {imagetest.Header("/manifests/", "Content-Type", ocispec.MediaTypeImageIndex), errdefs.ErrInvalidArgument},
		"connection refused for a layer": {imagetest.Hangup(layer.String(), -1), errdefs.ErrUnavailable},
		"connection lost once":           {imagetest.Hangup(layer.String(), 1), nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", img)
			n := newNode(t, nil)
			reg.Break(tt.fault)
			_, err := n.pull(ref)
			// The first kind is the one that callers see.
			if (tt.want == nil) != (err == nil) || (err != nil && !errors.Is(errdefs.Resolve(err), tt.want)) {
				t.Fatalf("pull: %v, want %v", err, tt.want)
			}
			if errdefs.IsUnavailable(err) && !strings.HasPrefix(err.Error(), "RegistryUnavailable") {
				t.Errorf("kubelet's reason is missing: %v", err)
			}
			if seen := len(reg.Requests("/")); seen > 40 {
				t.Errorf("%d requests", seen)
			}
			if err != nil {
				if n.present(ref) {
					t.Error("shown as present after a failed pull")
				}
				if !errdefs.IsUnavailable(err) {
					n.wantEmpty()
				}
			}
			reg.Break(nil)
			n.mustPull(ref)
			if got := n.read(ref, "etc/mark"); got != "x" {
				t.Errorf("etc/mark is %q", got)
			}
			if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
				t.Error(err)
			}
			n.wantEmpty()
			reg.Break(tt.fault)
			if _, err := n.pull(ref); tt.want != nil && err != nil {
				n.wantGivenUp()
			}
		})
	}
	t.Run("blob in place of the manifest", func(t *testing.T) {
		reg := imagetest.NewRegistry(t)
		reg.Push(t, "app:1", img)
		ref := reg.Host + "/app@" + manifest.String()
		n := newNode(t, nil)
		data, _ := img.RawManifest()
		reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			switch {
			case strings.Contains(r.URL.Path, "/manifests/"):
				http.Error(w, "down", http.StatusInternalServerError)
			case strings.HasSuffix(r.URL.Path, "/blobs/"+manifest.String()):
				w.Header().Set("Content-Type", "application/octet-stream")
				_, _ = w.Write(data)
			default:
				next.ServeHTTP(w, r)
			}
		})
		if _, err := n.pull(ref); !errdefs.IsUnavailable(err) {
			t.Errorf("pull: %v", err)
		}
		n.wantGivenUp()
		reg.Break(nil)
		n.mustPull(ref)
	})
}

func TestPullAsksTheVerifiers(t *testing.T) {
	img := someImage(t, "verified")
	want, _ := img.Digest()
	reg := imagetest.NewRegistry(t)
	ref := reg.Push(t, "app:1", img)
	dir := t.TempDir()
	asking := func(c *Config, _ *storage.Config) {
		c.Verifiers = verify.Programs{Dir: dir, Max: 10, Timeout: time.Minute}
	}
	n := newNode(t, asking)
	pushed := len(reg.Requests("/blobs/"))
	refused := func(words ...string) {
		t.Helper()
		_, err := n.pull(ref)
		if err == nil || !errors.Is(errdefs.Resolve(err), errdefs.ErrPermissionDenied) || !strings.HasPrefix(err.Error(), "SignatureValidationFailed: ") {
			t.Fatalf("pull: %v", err)
		}
		for _, w := range append(words, ref, want.String()) {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q is not in %v", w, err)
			}
		}
		if got := len(reg.Requests("/blobs/")) - pushed; got != 0 {
			t.Errorf("%d blobs were asked for", got)
		}
		if n.present(ref) {
			t.Error("shown as present")
		}
		n.wantEmpty()
	}
	refused(dir)
	imagetest.AddProgram(t, dir, "cosign", `echo "$2 has no signature"; exit 1`)
	refused("cosign", ref+" has no signature")

	imagetest.AddProgram(t, dir, "cosign", `[ "$4" = `+want.String()+` ]`)
	n.mustPull(ref)
	if got := n.read(ref, "etc/mark"); got != "verified" {
		t.Errorf("etc/mark is %q", got)
	}
	// A verdict that changes is for pulls to come: what is there stays.
	imagetest.AddProgram(t, dir, "cosign", "exit 1")
	if _, err := n.pull(ref); !errdefs.IsPermissionDenied(err) {
		t.Errorf("pull: %v", err)
	}
	if got := n.read(ref, "etc/mark"); got != "verified" {
		t.Errorf("etc/mark is %q after a refusal", got)
	}
}

func TestPullBadLayers(t *testing.T) {
	whole := imagetest.Tar(t, imagetest.File{Name: "f", Body: strings.Repeat("data", 10_000)})
	cut := imagetest.Compress(t, whole)
	tests := map[string][]byte{
		"gzip trailer":  append(slices.Clone(cut[:len(cut)-8]), "deadbeef"...),
		"gzip cut":      cut[:len(cut)/2],
		"tar cut":       imagetest.Compress(t, whole[:len(whole)/2]),
		"not a tarball": []byte("nonsense"),
		"wrong diff id": imagetest.Compress(t, imagetest.Tar(t, imagetest.File{Name: "f", Body: "other"})),
	}
	for name, data := range tests {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			n := newNode(t, nil)
			good := func(i int) v1.Layer {
				return imagetest.Layer(t, imagetest.File{Name: fmt.Sprint("good", i), Body: "x"})
			}
			bad := imagetest.RawLayer(data, digest.FromBytes(whole))
			ref := reg.Push(t, "bad:1", imagetest.Image(t, v1.Config{}, good(0), good(1), bad, good(2), good(3)))
			_, err := n.pull(ref)
			if !errdefs.IsDataLoss(err) {
				t.Errorf("pull: %v", err)
			}
			if n.present(ref) {
				t.Error("shown as present")
			}
			n.wantEmpty()
		})
	}
}

// TestPullGoesOn interrupts a pull in the middle of a layer and checks that the next one
// fetches the rest of it only, also after a restart.
func TestPullGoesOn(t *testing.T) {
	random := make([]byte, 3<<20)
	_, _ = rand.Read(random)
	big := imagetest.Layer(t, imagetest.File{Name: "big", Body: string(random)})
	img := imagetest.Image(t, v1.Config{}, imagetest.Layer(t, imagetest.File{Name: "small", Body: "x"}), big)
	layers, _ := img.Layers()
	small, _ := layers[0].Digest()
	hash, _ := big.Digest()
	size, _ := big.Size()
	// The layer stops after two thirds; the caller decides what then.
	stuck := func(arrived chan<- struct{}) imagetest.Fault {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if !strings.Contains(r.URL.Path, hash.String()) {
				next.ServeHTTP(w, r)
				return
			}
			body := imagetest.Whole(r, next)
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			_, _ = w.Write(body[:len(body)*2/3])
			_ = http.NewResponseController(w).Flush()
			select {
			case arrived <- struct{}{}:
			default:
			}
			<-r.Context().Done()
		}
	}
	for name, tt := range map[string]struct {
		change    func(*Config, *storage.Config)
		interrupt func(n *node)
		restart   bool
	}{
		"stall":             {change: func(c *Config, _ *storage.Config) { c.ProgressTimeout = 500 * time.Millisecond }},
		"stall and restart": {change: func(c *Config, _ *storage.Config) { c.ProgressTimeout = 500 * time.Millisecond }, restart: true},
		"restart":           {interrupt: func(n *node) { n.Close() }, restart: true},
		"restart with ranges": {
			change:    func(c *Config, _ *storage.Config) { c.RangeSize = 256 << 10 },
			interrupt: func(n *node) { n.Close() }, restart: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			reg := imagetest.NewRegistry(t)
			ref := reg.Push(t, "app:1", img)
			n := newNode(t, tt.change)
			arrived := make(chan struct{}, 1)
			reg.Break(stuck(arrived))
			result := make(chan error, 1)
			go func() {
				_, err := n.pull(ref)
				result <- err
			}()
			<-arrived
			if tt.interrupt != nil {
				eventually(t, func() bool {
					ctx := n.st.Context(t.Context())
					st, _ := n.st.Content().ListStatuses(ctx)
					_, err := n.st.Content().Info(ctx, digest.Digest(small.String()))
					return err == nil && len(st) == 1 && st[0].Offset > size/3
				})
				tt.interrupt(n)
			}
			if err := <-result; !errdefs.IsUnavailable(err) {
				t.Errorf("interrupted pull: %v", err)
			}
			if n.present(ref) {
				t.Error("shown as present")
			}
			if tt.restart {
				n.close()
				n.open(tt.change)
			}
			reg.Break(imagetest.Ranges(hash.String()))
			n.mustPull(ref)
			if got := n.read(ref, "big"); got != string(random) {
				t.Errorf("big has %d bytes", len(got))
			}
			if got := reg.Requests(small.String()); len(got) != 0 {
				t.Errorf("the whole layer was fetched again")
			}
			got := reg.Requests(hash.String())
			var from int64
			if len(got) > 0 {
				_, _ = fmt.Sscanf(got[0].Header.Get("Range"), "bytes=%d-", &from)
			}
			if from < size/3 {
				t.Errorf("the layer was fetched from %d of %d on", from, size)
			}
			if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
				t.Error(err)
			}
			n.wantEmpty()
		})
	}
}

// TestPullProgress checks what is told of a pull, and its spans.
func TestPullProgress(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	random := make([]byte, 8<<20)
	_, _ = rand.Read(random)
	img := imagetest.Image(t, v1.Config{}, imagetest.Layer(t, imagetest.File{Name: "a", Body: "a"}),
		imagetest.Layer(t, imagetest.File{Name: "b", Body: "b"}), imagetest.Layer(t, imagetest.File{Name: "big", Body: string(random)}))
	layers, _ := img.Layers()
	slow, _ := layers[2].Digest()
	ref := reg.Push(t, "app:1", img)
	n := newNode(t, nil)
	spans := tracetest.NewSpanRecorder()
	n.tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("")
	n.assembler = assembly.New(n.st, n.log, n.tracer)
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, slow.String()) {
			next.ServeHTTP(w, r)
			return
		}
		body := imagetest.Whole(r, next)
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		_, _ = w.Write(body[:len(body)/2])
		_ = http.NewResponseController(w).Flush()
		time.Sleep(2 * progress.Interval)
		_, _ = w.Write(body[len(body)/2:])
	})
	id := n.mustPull(ref)
	size := int64(0)
	for _, l := range layers {
		s, _ := l.Size()
		size += s
	}
	config, _ := img.RawConfigFile()
	total := uint64(size) + uint64(len(config))
	s, _ := layers[2].Size()
	rest := total - uint64(s)
	first, middle, last := n.steps[0], n.steps[1], n.steps[len(n.steps)-1]
	for _, e := range n.steps {
		if e.GetImage() != ref || e.GetPullId() != first.GetPullId() || e.GetLayersTotal() != 3 || e.GetBytesTotal() != total {
			t.Errorf("event %v", e)
		}
	}
	if len(n.steps) > 5 || first.GetState() != eventv1.PullState_PULL_STATE_RUNNING || first.GetBytesDone() != 0 {
		t.Errorf("%d events, the first is %v", len(n.steps), first)
	}
	// The library writes in pieces of a megabyte.
	if done := middle.GetBytesDone(); done < rest+uint64(s/3) || done > rest+uint64(s/2) || middle.GetLayersFetched() != 2 || middle.GetLayersUnpacked() != 2 {
		t.Errorf("in the middle: %v", middle)
	}
	if last.GetState() != eventv1.PullState_PULL_STATE_DONE || last.GetImageId() != id || last.GetBytesDone() != total || last.GetLayersUnpacked() != 3 {
		t.Errorf("last event: %v", last)
	}
	seen := map[string]int{}
	for _, s := range spans.Ended() {
		seen[s.Name()]++
	}
	want := map[string]int{"sandboxd.image.pull": 1, "sandboxd.image.resolve": 1, "sandboxd.image.fetch": 4, "sandboxd.image.extract": 3}
	for name, n := range want {
		if seen[name] != n {
			t.Errorf("%d spans %s, want %d", seen[name], name, n)
		}
	}

	n.steps = nil
	if _, err := n.pull(reg.Host + "/absent:1"); err == nil {
		t.Fatal("absent image pulled")
	}
	if len(n.steps) != 1 || n.steps[0].GetState() != eventv1.PullState_PULL_STATE_FAILED || !strings.Contains(n.steps[0].GetError(), "not found") {
		t.Errorf("events of a failed pull: %v", n.steps)
	}
}

func TestPullMendsBrokenImages(t *testing.T) {
	img := someImage(t, "x")
	layers, _ := img.Layers()
	layer, _ := layers[1].Digest()
	manifest, _ := img.Digest()
	config, _ := img.ConfigName()
	blob := func(h v1.Hash) string { return "content/blobs/sha256/" + h.Hex }
	tests := map[string]struct {
		harm   func(t *testing.T, root string)
		absent bool
	}{
		"layer folder gone":   {func(t *testing.T, root string) { t.Helper(); removeAll(t, root, "overlayfs/snapshots/*/fs/etc/..") }, true},
		"all layers gone":     {func(t *testing.T, root string) { t.Helper(); removeAll(t, root, "overlayfs/snapshots/*") }, true},
		"manifest blob gone":  {func(t *testing.T, root string) { t.Helper(); removeAll(t, root, blob(manifest)) }, true},
		"manifest blob empty": {func(t *testing.T, root string) { t.Helper(); empty0(t, root, blob(manifest)) }, true},
		"config blob gone":    {func(t *testing.T, root string) { t.Helper(); removeAll(t, root, blob(config)) }, true},
		"layer blob gone":     {func(t *testing.T, root string) { t.Helper(); removeAll(t, root, blob(layer)) }, false},
		"layer blob empty and folders gone": {func(t *testing.T, root string) {
			t.Helper()
			empty0(t, root, blob(layer))
			removeAll(t, root, "overlayfs/snapshots/*")
		}, true},
	}
	for name, tt := range tests {
		for _, restart := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/restart=%v", name, restart), func(t *testing.T) {
				reg := imagetest.NewRegistry(t)
				ref := reg.Push(t, "app:1", img)
				n := newNode(t, nil)
				id := n.mustPull(ref)
				if restart {
					n.close()
				}
				tt.harm(t, n.root)
				if restart {
					n.open(nil)
				}
				if n.present(ref) == tt.absent {
					t.Errorf("present: %v", !tt.absent)
				}
				if got := n.mustPull(ref); got != id {
					t.Errorf("id is %s", got)
				}
				if got := n.read(ref, "etc/mark"); got != "x" {
					t.Errorf("etc/mark is %q", got)
				}
				if got := n.read(ref, "big"); len(got) < 300_000 {
					t.Errorf("big has %d bytes", len(got))
				}
				if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
					t.Error(err)
				}
				n.wantEmpty()
				n.mustPull(ref)
			})
		}
	}
}

func TestRemoveUnreadable(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	n := newNode(t, nil)
	img := someImage(t, "x")
	ref := reg.Push(t, "app:1", img)
	n.mustPull(ref)
	n.close()
	config, _ := img.ConfigName()
	removeAll(t, n.root, "content/blobs/sha256/"+config.Hex)
	n.open(nil)
	if list, _ := n.List(t.Context(), nil); len(list) != 0 {
		t.Errorf("list: %v", list)
	}
	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
		t.Fatal(err)
	}
	n.wantEmpty()
}

func TestPullJoinsAndCancels(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	img := someImage(t, "x")
	layers, _ := img.Layers()
	layer, _ := layers[2].Digest()
	ref := reg.Push(t, "app:1", img)
	n := newNode(t, nil)
	gate := make(chan struct{})
	arrived := make(chan struct{}, 10)
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, layer.String()) {
			arrived <- struct{}{}
			select {
			case <-gate:
			case <-r.Context().Done():
				return
			}
		}
		next.ServeHTTP(w, r)
	})
	start := func() (cancel func(), result chan error) {
		ctx, cancel := context.WithCancel(t.Context())
		result = make(chan error, 1)
		go func() {
			_, err := n.Pull(ctx, &criv1.ImageSpec{Image: ref}, nil, nil)
			result <- err
		}()
		return cancel, result
	}
	cancel1, result1 := start()
	<-arrived
	cancel2, result2 := start()
	eventually(t, func() bool {
		n.pulls.mu.Lock()
		defer n.pulls.mu.Unlock()
		return len(n.pulls.running) == 1 && waitingOf(&n.pulls) == 2
	})
	cancel1()
	if err := <-result1; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled caller: %v", err)
	}
	close(gate)
	if err := <-result2; err != nil {
		t.Errorf("remaining caller: %v", err)
	}
	cancel2()
	if got := len(reg.Requests(layer.String())); got != 1 {
		t.Errorf("layer was fetched %d times", got)
	}

	// A pull that nobody waits for is cancelled and leaves nothing.
	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
		t.Fatal(err)
	}
	gate = make(chan struct{})
	cancel3, result3 := start()
	<-arrived
	cancel3()
	if err := <-result3; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled caller: %v", err)
	}
	n.pulls.work.Wait()
	n.wantEmpty()
	close(gate)
	n.mustPull(ref)
}

func waitingOf(f *flights) (sum int) {
	for _, fl := range f.running {
		sum += fl.waiting
	}
	return sum
}

func TestPullStalls(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	img := someImage(t, "x")
	layers, _ := img.Layers()
	layer, _ := layers[2].Digest()
	ref := reg.Push(t, "app:1", img)
	n := newNode(t, func(c *Config, _ *storage.Config) { c.ProgressTimeout = 300 * time.Millisecond })
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, layer.String()) {
			<-r.Context().Done()
			return
		}
		next.ServeHTTP(w, r)
	})
	if _, err := n.pull(ref); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "nothing received") {
		t.Errorf("stalled pull: %v", err)
	}
	n.wantGivenUp()
	reg.Break(nil)
	n.mustPull(ref)
}

func TestPullsShareLayers(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	n := newNode(t, nil)
	base := imagetest.Layer(t, imagetest.File{Name: "base", Body: strings.Repeat("base", 100_000)})
	h, _ := base.Digest()
	var refs []string
	for i := range 4 {
		top := imagetest.Layer(t, imagetest.File{Name: "top", Body: fmt.Sprint(i)})
		refs = append(refs, reg.Push(t, fmt.Sprintf("app%d:1", i), imagetest.Image(t, v1.Config{}, base, top)))
	}
	reg.Break(nil)
	var wg sync.WaitGroup
	for _, ref := range refs {
		wg.Go(func() {
			if _, err := n.pull(ref); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, ref := range refs {
		if got := n.read(ref, "top"); got != fmt.Sprint(i) {
			t.Errorf("top of %s is %q", ref, got)
		}
	}
	if got := len(reg.Requests(h.String())); got != 1 {
		t.Errorf("shared layer was fetched %d times", got)
	}
}

func TestKillDuringPull(t *testing.T) {
	reg := imagetest.NewRegistry(t)
	img := someImage(t, "x")
	ref := reg.Push(t, "app:1", img)
	n := newNode(t, nil)
	n.mustPull(ref)
	// A lease that was never released, as a killed process leaves it, with a snapshot.
	ctx, _, err := n.st.Lease(n.st.Context(t.Context()), "some pull")
	if err != nil {
		t.Fatal(err)
	}
	sn, _, _ := n.st.Snapshotter("")
	if _, err := sn.Prepare(ctx, "unfinished", ""); err != nil {
		t.Fatal(err)
	}
	_, _, before := n.leftovers()
	n.reopen()
	if _, _, after := n.leftovers(); after != before-1 {
		t.Errorf("%d layers before, %d after", before, after)
	}
	if !n.present(ref) {
		t.Error("image lost")
	}
}

func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := (&mount.Mount{Type: "tmpfs", Source: "tmpfs", Options: []string{"size=24m"}}).Mount(dir); err != nil {
		testkit.Lacks(t, "tmpfs: "+err.Error())
	}
	t.Cleanup(func() {
		runtime.GC() // the content store forgets to close a file
		eventually(t, func() bool { return mount.UnmountAll(dir, 0) == nil })
	})
	reg := imagetest.NewRegistry(t)
	random := make([]byte, 40<<20)
	_, _ = rand.Read(random)
	download := reg.Push(t, "download:1", imagetest.Image(t, v1.Config{}, imagetest.Layer(t, imagetest.File{Name: "f", Body: string(random)})))
	extract := reg.Push(t, "extract:1", imagetest.Image(t, v1.Config{}, imagetest.Layer(t, imagetest.File{Name: "f", Body: strings.Repeat("0", 40<<20)})))
	small := reg.Push(t, "small:1", someImage(t, "x"))
	n := &node{t: t, root: dir}
	n.open(nil)
	t.Cleanup(n.close)
	for i := range 3 {
		for _, ref := range []string{download, extract} {
			if _, err := n.pull(ref); !errdefs.IsResourceExhausted(err) {
				t.Fatalf("pull of %s: %v", ref, err)
			}
		}
		n.wantEmpty()
		n.mustPull(small)
		if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: small}); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		n.wantEmpty()
	}
}

func removeAll(t *testing.T, root, pattern string) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(root, pattern))
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: %v %v", pattern, found, err)
	}
	for _, f := range found {
		if err := os.RemoveAll(filepath.Clean(f)); err != nil {
			t.Fatal(err)
		}
	}
}

func empty0(t *testing.T, root, name string) {
	t.Helper()
	if err := os.Truncate(filepath.Join(root, name), 0); err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for range 500 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("did not happen in time")
}
