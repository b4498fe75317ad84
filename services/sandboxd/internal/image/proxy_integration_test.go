//go:build integration

package image

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	labels "github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
)

// served is containerd's overlay snapshotter as a process of its own would serve it. It keeps
// the labels that it is given, and has some layers before they are fetched.
type served struct {
	snapshots.Snapshotter

	socket string
	server *grpc.Server
	done   chan error

	mu    sync.Mutex
	asked []map[string]string // the labels of each Prepare
	// remote are the files of layers that need no download, by their digest.
	remote map[string]map[string]string
	hang   chan struct{} // if not nil, Prepare waits for its end
}

func serveSnapshotter(t *testing.T) *served {
	t.Helper()
	dir := t.TempDir()
	sn, err := overlay.NewSnapshotter(filepath.Join(dir, "root"))
	if err != nil {
		t.Fatal(err)
	}
	s := &served{Snapshotter: sn, socket: filepath.Join(dir, "s.sock")}
	s.start(t)
	t.Cleanup(func() {
		s.stop(t)
		if err := sn.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *served) start(t *testing.T) {
	t.Helper()
	lis, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	s.server, s.done = grpc.NewServer(), make(chan error, 1)
	snapshotsapi.RegisterSnapshotsServer(s.server, snapshotservice.FromSnapshotter(s))
	go func() { s.done <- s.server.Serve(lis) }()
}

func (s *served) stop(t *testing.T) {
	t.Helper()
	if s.server == nil {
		return
	}
	s.server.Stop()
	if err := <-s.done; err != nil {
		t.Error(err)
	}
	s.server = nil
}

// Prepare implements snapshots.Snapshotter.
func (s *served) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	var info snapshots.Info
	for _, o := range opts {
		if err := o(&info); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	s.asked = append(s.asked, info.Labels)
	files, here := s.remote[info.Labels[labels.TargetLayerDigestLabel]]
	hang := s.hang
	s.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	mounts, err := s.Snapshotter.Prepare(ctx, key, parent, opts...)
	if err != nil || !here {
		return mounts, err
	}
	err = mount.WithTempMount(ctx, mounts, func(root string) error {
		var errs []error
		for name, body := range files {
			errs = append(errs, os.WriteFile(filepath.Join(root, name), []byte(body), 0o644))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return nil, err
	}
	if err := s.Commit(ctx, "remote-"+key, key, opts...); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("layer is here: %w", errdefs.ErrAlreadyExists)
}

// lazy is a node whose handler "lazy" uses the snapshotter.
func (s *served) lazy(t *testing.T) *node {
	t.Helper()
	return newNode(t, func(c *Config, sc *storage.Config) {
		sc.Proxies = map[string]storage.Proxy{"stars": {Socket: s.socket}}
		c.Snapshotters = map[string]string{"lazy": "stars"}
	})
}

func (n *node) pullFor(handler, ref string) error {
	_, err := n.Pull(n.t.Context(), &criv1.ImageSpec{Image: ref, RuntimeHandler: handler}, nil, nil)
	return err
}

// layered is an image whose layers have the files "a" and "b", and notes for snapshotters.
func layered(t *testing.T) (img v1.Image, digests []string) {
	t.Helper()
	img = imagetest.Image(t, v1.Config{}, imagetest.Layer(t, imagetest.File{Name: "a", Body: "layer a"}))
	img, err := mutate.Append(img, mutate.Addendum{
		Layer: imagetest.Layer(t, imagetest.File{Name: "b", Body: "layer b"}),
		Annotations: map[string]string{
			"containerd.io/snapshot/stargz/toc.digest":  "sha256:toc",
			"containerd.io/snapshot/overlay.upperdir":   "/etc",
			"containerd.io/snapshot/uidmapping":         "0:5:1",
			"containerd.io/snapshot/cri.layer-digest":   "sha256:other",
			"containerd.io/gc.root":                     "true",
			"org.opencontainers.image.something.unused": "x",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range layers {
		h, err := l.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, h.String())
	}
	return img, digests
}

func TestPullForAProxySnapshotter(t *testing.T) {
	s := serveSnapshotter(t)
	n := s.lazy(t)
	reg := imagetest.NewRegistry(t)
	img, digests := layered(t)
	ref := reg.Push(t, "app:1", img)
	if err := n.pullFor("lazy", ref); err != nil {
		t.Fatal(err)
	}
	if got := n.read(ref, "a") + n.read(ref, "b"); got != "layer alayer b" {
		t.Errorf("image has %q", got)
	}
	manifest, _ := img.Digest()
	want := map[string]string{
		labels.TargetRefLabel: ref, labels.TargetManifestDigestLabel: manifest.String(),
		labels.TargetLayerDigestLabel: digests[1], labels.TargetImageLayersLabel: digests[1],
		"containerd.io/snapshot/stargz/toc.digest": "sha256:toc", "containerd.io/snapshot/overlay.upperdir": "",
		"containerd.io/snapshot/uidmapping": "", "containerd.io/gc.root": "",
	}
	s.mu.Lock()
	for name, value := range want {
		if got := s.asked[1][name]; got != value {
			t.Errorf("label %s is %q, want %q", name, got, value)
		}
	}
	if got := s.asked[0][labels.TargetImageLayersLabel]; got != strings.Join(digests, ",") {
		t.Errorf("layers are %q", got)
	}
	s.mu.Unlock()

	n.reopen()
	if got := n.read(ref, "b"); got != "layer b" {
		t.Errorf("after a restart the image has %q", got)
	}
	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
		t.Error(err)
	}
	left := 0
	if err := s.Walk(t.Context(), func(context.Context, snapshots.Info) error { left++; return nil }); err != nil || left > 0 {
		t.Errorf("%d snapshots left, %v", left, err)
	}
}

// A snapshotter that hangs holds up its own pulls only.
func TestProxySnapshotterThatHangs(t *testing.T) {
	s := serveSnapshotter(t)
	n := s.lazy(t)
	reg := imagetest.NewRegistry(t)
	img, _ := layered(t)
	ref := reg.Push(t, "app:1", img)
	s.mu.Lock()
	s.hang = make(chan struct{})
	s.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := n.Pull(ctx, &criv1.ImageSpec{Image: ref, RuntimeHandler: "lazy"}, nil, nil)
		ended <- err
	}()
	eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.asked) > 0
	})
	n.mustPull(ref)
	if got := n.read(ref, "b"); got != "layer b" {
		t.Errorf("image has %q", got)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled pull: %v", err)
	}
	s.mu.Lock()
	close(s.hang)
	s.hang = nil
	s.mu.Unlock()
	if err := n.pullFor("lazy", ref); err != nil {
		t.Error(err)
	}
}

func TestLayersThatASnapshotterHasAreNotFetched(t *testing.T) {
	s := serveSnapshotter(t)
	n := s.lazy(t)
	reg := imagetest.NewRegistry(t)
	img, digests := layered(t)
	ref := reg.Push(t, "app:1", img)
	s.remote = map[string]map[string]string{digests[0]: {"a": "lazy a"}, digests[1]: {"b": "lazy b"}}
	for range 2 {
		reg.Break(nil)
		if err := n.pullFor("lazy", ref); err != nil {
			t.Fatal(err)
		}
		for _, d := range digests {
			if got := reg.Requests(d); len(got) > 0 {
				t.Errorf("layer %s was fetched %d times", d, len(got))
			}
		}
	}
	if got := n.read(ref, "a") + n.read(ref, "b"); got != "lazy alazy b" {
		t.Errorf("image has %q", got)
	}
	// Another handler gets the image all the same.
	if err := n.pullFor("", ref); err != nil {
		t.Fatal(err)
	}
	if got := n.read(ref, "a") + n.read(ref, "b"); got != "layer alayer b" {
		t.Errorf("image of the default snapshotter has %q", got)
	}
}

func TestProxySnapshotterThatIsAway(t *testing.T) {
	s := serveSnapshotter(t)
	n := s.lazy(t)
	reg := imagetest.NewRegistry(t)
	img, _ := layered(t)
	ref := reg.Push(t, "app:1", img)
	if err := n.pullFor("lazy", ref); err != nil {
		t.Fatal(err)
	}
	s.stop(t)
	away := func(what string, err error) {
		t.Helper()
		if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), `proxy snapshotter "stars" at `+s.socket) {
			t.Errorf("%s: error %v", what, err)
		}
		if err != nil && strings.Contains(err.Error(), "RegistryUnavailable") {
			t.Errorf("%s blames the registry: %v", what, err)
		}
	}
	away("pull", n.pullFor("lazy", reg.Push(t, "app:2", someImage(t, "y"))))
	_, _, err := n.Status(t.Context(), &criv1.ImageSpec{Image: ref, RuntimeHandler: "lazy"}, false)
	away("status", err)
	_, err = n.Resolve(t.Context(), ref)
	away("resolve", err)

	other := reg.Push(t, "app:3", someImage(t, "z"))
	n.mustPull(other)
	if got := n.read(other, "etc/mark"); got != "z" {
		t.Errorf("etc/mark is %q", got)
	}
	if _, _, err := n.Usage(t.Context()); err != nil {
		t.Error(err)
	}
	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: other}); err != nil {
		t.Error(err)
	}
	if list, err := n.List(t.Context(), nil); err != nil || !slices.ContainsFunc(list, func(i *criv1.Image) bool { return slices.Contains(i.GetRepoTags(), ref) }) {
		t.Errorf("images %v, error %v", list, err)
	}
	n.reopen()

	s.start(t)
	eventually(t, func() bool { return n.pullFor("lazy", ref) == nil })
	if got := n.read(ref, "b"); got != "layer b" {
		t.Errorf("when the snapshotter is back, the image has %q", got)
	}
}
