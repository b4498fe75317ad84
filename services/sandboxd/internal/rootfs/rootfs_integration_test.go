//go:build integration

package rootfs

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"go.opentelemetry.io/otel/trace/noop"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestRootfs(t *testing.T) {
	for _, snapshotter := range []string{storage.Overlay, storage.Native, storage.Erofs} {
		t.Run(snapshotter, func(t *testing.T) { testRootfs(t, snapshotter) })
	}
}

func testRootfs(t *testing.T, snapshotter string) {
	t.Helper()
	ctx := t.Context()
	log := slog.New(slog.DiscardHandler)
	root := t.TempDir()
	st, err := storage.Open(ctx, storage.Config{Root: root, Snapshotter: snapshotter}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	images := image.New(image.Config{}, st, log, noop.NewTracerProvider().Tracer(""), func(context.Context, string) []string { return nil })
	if err := images.Load(ctx); err != nil {
		t.Fatal(err)
	}
	defer images.Close()
	reg := imagetest.NewRegistry(t)
	ref := reg.Push(t, "app:1", imagetest.Image(t, v1.Config{},
		imagetest.Layer(t,
			imagetest.File{Name: "usr/", Type: '5'}, imagetest.File{Name: "usr/passwd", Body: "me:x:7:7::/:/bin/sh\n"},
			imagetest.File{Name: "etc/", Type: '5', Mode: 0o700, UID: 9}, imagetest.File{Name: "etc/passwd", Type: '2', Link: "/usr/passwd"},
			imagetest.File{Name: "old", Body: "old"}),
		imagetest.Layer(t, imagetest.File{Name: "etc/group", Body: "us:x:8:\n"}, imagetest.File{Name: ".wh.old"})))
	if _, err := images.Pull(ctx, &criv1.ImageSpec{Image: ref}, nil, nil); err != nil {
		t.Fatal(err)
	}
	img, err := images.Resolve(ctx, ref)
	if err != nil {
		t.Fatal(err)
	}
	r := New(st)

	accounts, err := r.Accounts(ctx, img)
	if err != nil || !bytes.HasPrefix(accounts.Passwd, []byte("me:")) || !bytes.HasPrefix(accounts.Group, []byte("us:")) {
		t.Errorf("accounts: %q %v", accounts, err)
	}

	mounts, err := r.Prepare(ctx, "c1", img, pod.IDMap{})
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.Prepare(ctx, "c1", img, pod.IDMap{})
	if err != nil || len(again) != 1 || !slices.Equal(again[0].Options, mounts[0].Options) {
		t.Errorf("prepared again: %v %v", again, err)
	}
	err = mount.WithTempMount(ctx, mounts, func(dir string) error {
		if _, err := os.Stat(filepath.Join(dir, "old")); err == nil {
			t.Error("a removed file is visible")
		}
		fi, err := os.Stat(filepath.Join(dir, "etc"))
		if err != nil || fi.Mode().Perm() != 0o700 {
			t.Errorf("a folder that a later layer leaves out lost its mode: %v %v", fi.Mode(), err)
		}
		return os.WriteFile(filepath.Join(dir, "written"), make([]byte, 1<<20), 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	if n, inodes, err := r.Usage(ctx, "c1", snapshotter); err != nil || n < 1<<20 || inodes == 0 {
		t.Errorf("usage: %d %d %v", n, inodes, err)
	}
	// The layer outlives its image's name and a restart of the collector.
	if err := images.Remove(ctx, &criv1.ImageSpec{Image: ref}); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Mounts(ctx, "c1", snapshotter); err != nil || !slices.Equal(got[0].Options, mounts[0].Options) {
		t.Errorf("mounts after the image was removed: %v %v", got, err)
	}
	keys, err := r.Keys(ctx)
	if err != nil || !slices.Equal(keys[snapshotter], []string{"c1"}) {
		t.Errorf("keys: %v %v", keys, err)
	}
	for range 2 {
		if err := r.Remove(ctx, "c1", snapshotter); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.Mounts(ctx, "c1", snapshotter); !errdefs.IsNotFound(err) {
		t.Errorf("mounts of a removed layer: %v", err)
	}
	if err := st.Collect(ctx); err != nil {
		t.Error(err)
	}
	if _, err := r.Prepare(ctx, "c2", img, pod.IDMap{}); !errdefs.IsNotFound(err) {
		t.Errorf("prepared on a removed image: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(root, "*/snapshots/*")); len(left) > 0 {
		t.Errorf("left on disk: %v", left)
	}
	mountinfo, _ := os.ReadFile("/proc/self/mountinfo")
	if strings.Contains(string(mountinfo), root) {
		t.Error("a mount was left")
	}
}

// User namespaces need the file system on which the snapshotter of a handler keeps its layers.
func TestMapsIDsBySnapshotter(t *testing.T) {
	root := t.TempDir()
	st, err := storage.Open(t.Context(), storage.Config{Root: root, Proxies: map[string]storage.Proxy{
		"beside":    {Socket: filepath.Join(root, "no.sock")},
		"elsewhere": {Socket: filepath.Join(root, "no.sock"), Root: "/proc/self"},
	}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	r := New(st)
	if r.MapsIDs("elsewhere") {
		t.Error("a file system that cannot shift ids is said to")
	}
	if beside, standard := r.MapsIDs("beside"), r.MapsIDs(""); beside != standard {
		t.Errorf("on the file system of the images: %v, and %v for the default snapshotter", beside, standard)
	}
}
