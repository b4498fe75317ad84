//go:build integration

package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
)

// discarding is a node that gives up the blobs of unpacked layers.
func discarding(t *testing.T) *node {
	t.Helper()
	return newNode(t, func(c *Config, _ *storage.Config) {
		c.DiscardLayers = true
		c.Snapshotters = map[string]string{"copies": storage.Native}
	})
}

// wantLayers checks, after a collection, how many blobs of an image's layers are on the node,
// and that all else of the image is.
func (n *node) wantLayers(img v1.Image, want int) {
	n.t.Helper()
	if err := n.st.Collect(n.st.Context(n.t.Context())); err != nil {
		n.t.Error(err)
	}
	on := func(h v1.Hash) bool {
		_, err := os.Stat(filepath.Join(n.root, "content/blobs/sha256", h.Hex))
		return err == nil
	}
	layers, err := img.Layers()
	if err != nil {
		n.t.Fatal(err)
	}
	found := 0
	for _, l := range layers {
		h, err := l.Digest()
		if err != nil {
			n.t.Fatal(err)
		}
		if on(h) {
			found++
		}
	}
	manifest, _ := img.Digest()
	config, _ := img.ConfigName()
	if found != want || !on(manifest) || !on(config) {
		n.t.Errorf("%d of %d layers are on the node, %d wanted; manifest: %v, configuration: %v", found, len(layers), want, on(manifest), on(config))
	}
}

func TestUnpackedLayersAreDiscarded(t *testing.T) {
	n := discarding(t)
	reg := imagetest.NewRegistry(t)
	img := someImage(t, "x")
	ref := reg.Push(t, "app:1", img)
	size := func() uint64 {
		t.Helper()
		shown, _, err := n.Status(t.Context(), &criv1.ImageSpec{Image: ref}, false)
		if err != nil || shown == nil {
			t.Fatalf("image %v, error %v", shown, err)
		}
		return shown.GetSize()
	}
	n.mustPull(ref)
	n.wantLayers(img, 0)
	first := size()
	manifest, _ := img.Manifest()
	if least := uint64(manifest.Layers[0].Size + manifest.Layers[1].Size); first < least {
		t.Errorf("size %d is less than that of the layers, %d", first, least)
	}

	n.reopen()
	n.wantLayers(img, 0)
	if got := n.read(ref, "etc/mark"); got != "x" || size() != first {
		t.Errorf("after a restart, etc/mark is %q, the size %d, not %d", got, size(), first)
	}

	reg.Break(nil)
	n.mustPull(ref)
	if got := reg.Requests("/blobs/"); len(got) > 0 {
		t.Errorf("a pull of what is there fetched %d blobs", len(got))
	}
	n.wantLayers(img, 0)

	removeAll(t, n.root, "overlayfs/snapshots/*/fs/etc/mark/../..")
	if n.present(ref) {
		t.Error("an image without its files is shown")
	}
	n.mustPull(ref)
	if got := n.read(ref, "etc/mark"); got != "x" {
		t.Errorf("mended, etc/mark is %q", got)
	}
	n.wantLayers(img, 0)

	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: ref}); err != nil {
		t.Error(err)
	}
	n.wantEmpty()
}

func TestDiscardedLayersAreShared(t *testing.T) {
	n := discarding(t)
	reg := imagetest.NewRegistry(t)
	base := imagetest.Layer(t, imagetest.File{Name: "base", Body: strings.Repeat("base", 10_000)})
	h, _ := base.Digest()
	one := imagetest.Image(t, v1.Config{}, base, imagetest.Layer(t, imagetest.File{Name: "top", Body: "1"}))
	two := imagetest.Image(t, v1.Config{}, base, imagetest.Layer(t, imagetest.File{Name: "top", Body: "2"}))
	first, second := reg.Push(t, "app:1", one), reg.Push(t, "app:2", two)
	n.mustPull(first)
	n.wantLayers(one, 0)
	reg.Break(nil)
	n.mustPull(second)
	if got := reg.Requests(h.String()); len(got) > 0 {
		t.Errorf("the shared layer, which is unpacked, was fetched %d times", len(got))
	}
	n.wantLayers(two, 0)
	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: first}); err != nil {
		t.Error(err)
	}
	if got := n.read(second, "base") + n.read(second, "top"); !strings.HasSuffix(got, "base2") {
		t.Errorf("the other image has %.20q", got)
	}
}

func TestDiscardingIsSwitched(t *testing.T) {
	n := discarding(t)
	reg := imagetest.NewRegistry(t)
	img := someImage(t, "x")
	ref := reg.Push(t, "app:1", img)
	for range 2 {
		for _, discard := range []bool{false, true} {
			conf := n.conf.Load().Config
			conf.DiscardLayers = discard
			if err := n.Configure(t.Context(), conf); err != nil {
				t.Fatal(err)
			}
			n.mustPull(ref)
			want := 3
			if discard {
				want = 0
			}
			n.wantLayers(img, want)
			if got := n.read(ref, "etc/mark"); got != "x" {
				t.Errorf("etc/mark is %q", got)
			}
		}
	}
}

func TestDiscardedLayersForAnotherSnapshotter(t *testing.T) {
	n := discarding(t)
	reg := imagetest.NewRegistry(t)
	img := someImage(t, "x")
	ref := reg.Push(t, "app:1", img)
	n.mustPull(ref)
	n.wantLayers(img, 0)
	resolved, err := n.Resolve(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	_, err = n.Unpack(t.Context(), resolved, storage.Native)
	if !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "pull the image for this runtime handler") {
		t.Errorf("unpacking what is not there: %v", err)
	}
	if _, err := n.Pull(t.Context(), &criv1.ImageSpec{Image: ref, RuntimeHandler: "copies"}, nil, nil); err != nil {
		t.Fatal(err)
	}
	unpacked, err := n.Unpack(t.Context(), resolved, storage.Native)
	if err != nil || unpacked.Snapshotter != storage.Native {
		t.Errorf("unpacked %+v, %v", unpacked, err)
	}
	n.wantLayers(img, 0)
}

// A pull is for the handler that it names, an unknown one is refused, and no name is the default one.
func TestHandlersOfImages(t *testing.T) {
	n := newNode(t, func(c *Config, _ *storage.Config) {
		c.Snapshotters = map[string]string{"": storage.Native, "copies": storage.Native, "plain": ""}
	})
	reg := imagetest.NewRegistry(t)
	ref := reg.Push(t, "app:1", someImage(t, "x"))
	unknown := &criv1.ImageSpec{Image: ref, RuntimeHandler: "nobody"}
	if _, err := n.Pull(t.Context(), unknown, nil, nil); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "copies, plain") {
		t.Errorf("pull for an unknown handler: %v", err)
	}
	if _, _, err := n.Status(t.Context(), unknown, false); !errdefs.IsInvalidArgument(err) {
		t.Errorf("status for an unknown handler: %v", err)
	}
	n.mustPull(ref)
	if img, err := n.Resolve(t.Context(), ref); err != nil || img.Snapshotter != storage.Native {
		t.Errorf("pulled for the default handler: %+v, %v", img, err)
	}
	if got, _, err := n.Status(t.Context(), &criv1.ImageSpec{Image: ref, RuntimeHandler: "plain"}, false); got != nil || err != nil {
		t.Errorf("shown for another handler before it was pulled for that: %v, %v", got, err)
	}
	if _, err := n.Pull(t.Context(), &criv1.ImageSpec{Image: ref, RuntimeHandler: "plain"}, nil, nil); err != nil {
		t.Error(err)
	}
	if got, _, err := n.Status(t.Context(), &criv1.ImageSpec{Image: ref, RuntimeHandler: "plain"}, false); got == nil || err != nil {
		t.Errorf("not shown for the handler that it was pulled for: %v, %v", got, err)
	}
	if err := n.Remove(t.Context(), unknown); err != nil {
		t.Errorf("removal for a handler that is gone: %v", err)
	}
	n.wantEmpty()
}
