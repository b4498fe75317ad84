//go:build integration

package rootfs

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// node is an image storage with one pulled image.
type node struct {
	t      *testing.T
	root   string
	st     *storage.Storage
	images *image.Service
	ref    string
	img    pod.Image
}

func newNode(t *testing.T, snapshotter string, config v1.Config, layers ...v1.Layer) *node {
	t.Helper()
	n := &node{t: t, root: t.TempDir()}
	t.Cleanup(func() { // layers that a container, which a test may leave, is on top of
		if err := mount.UnmountRecursive(n.root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	log := slog.New(slog.DiscardHandler)
	var err error
	if n.st, err = storage.Open(t.Context(), storage.Config{Root: n.root, Snapshotter: snapshotter}, log); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.st.Close(); err != nil {
			t.Error(err)
		}
	})
	n.images = image.New(image.Config{}, n.st, log, noop.NewTracerProvider().Tracer(""), func(context.Context, string) []string { return nil })
	if err := n.images.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.images.Close)
	n.ref = imagetest.NewRegistry(t).Push(t, "app:1", imagetest.Image(t, config, layers...))
	n.pull()
	return n
}

func (n *node) pull() {
	n.t.Helper()
	if _, err := n.images.Pull(n.t.Context(), &criv1.ImageSpec{Image: n.ref}, nil, nil); err != nil {
		n.t.Fatal(err)
	}
	var err error
	if n.img, err = n.images.Resolve(n.t.Context(), n.ref); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) mounts(below string) int {
	n.t.Helper()
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.t.Fatal(err)
	}
	return strings.Count(string(info), " "+below)
}

func volumeLayers(t *testing.T) map[string][]v1.Layer {
	t.Helper()
	first := imagetest.Layer(t,
		imagetest.File{Name: "data/", Type: '5'}, imagetest.File{Name: "data/file", Body: "content", UID: 5},
		imagetest.File{Name: "data/inner", Type: '2', Link: "file"},
		imagetest.File{Name: "up", Type: '2', Link: "../../../../../../etc"}, imagetest.File{Name: "abs", Type: '2', Link: "/etc"},
		imagetest.File{Name: "pipe", Type: '6'})
	return map[string][]v1.Layer{
		"one layer":  {first},
		"two layers": {first, imagetest.Layer(t, imagetest.File{Name: "more", Body: "x"})},
	}
}

func TestImageVolumes(t *testing.T) {
	for _, snapshotter := range []string{storage.Overlay, storage.Native, storage.Erofs} {
		for name, layers := range volumeLayers(t) {
			t.Run(snapshotter+" "+name, func(t *testing.T) { testVolumes(t, snapshotter, layers) })
		}
	}
}

func testVolumes(t *testing.T, snapshotter string, layers []v1.Layer) {
	t.Helper()
	ctx := t.Context()
	n := newNode(t, snapshotter, v1.Config{}, layers...)
	root := t.TempDir()
	v := NewVolumes(n.st, root)
	t.Cleanup(func() { _ = v.Release(context.WithoutCancel(ctx), "s1", "") })

	whole, err := v.Mount(ctx, "s1", "c1", n.img, pod.IDMap{}, "")
	if err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(filepath.Join(whole, "data/inner")); err != nil || string(data) != "content" {
		t.Errorf("content: %q %v", data, err)
	}
	if err := os.WriteFile(filepath.Join(whole, "data/new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write: %v, want a read-only file system", err)
	}
	// A second container, after a restart of the process, shares the mount.
	v = NewVolumes(n.st, root)
	for sub, want := range map[string]string{"data": "data", "data/../data/./file": "data/file", "data/inner": "data/file"} {
		got, err := v.Mount(ctx, "s1", "c2", n.img, pod.IDMap{}, sub)
		if err != nil || got != filepath.Join(whole, want) {
			t.Errorf("sub path %q: %q %v", sub, got, err)
		}
	}
	if got := n.mounts(root); got != 1 {
		t.Errorf("%d mounts for two containers", got)
	}
	for _, bad := range []string{"missing", "../x", "data/../..", "/etc", "up", "up/passwd", "abs", "pipe", "data/file/x", "a\x00b", strings.Repeat("a", 5000)} {
		if got, err := v.Mount(ctx, "s1", "c3", n.img, pod.IDMap{}, bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("sub path %.20q: %q %v, want an invalid argument", bad, got, err)
		}
	}
	want := map[string][]string{"s1": {"c1", "c2"}}
	if got, err := v.Holders(); err != nil || !cmp.Equal(got, want) {
		t.Errorf("holders: %v %v", got, err)
	}
	// The mount outlives the image's name.
	if err := n.images.Remove(ctx, &criv1.ImageSpec{Image: n.ref}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(whole, "data/file")); err != nil {
		t.Error(err)
	}
	for _, id := range []string{"c1", "unknown", "c1"} {
		if err := v.Release(ctx, "s1", id); err != nil {
			t.Error(err)
		}
	}
	if got := n.mounts(root); got != 1 {
		t.Errorf("%d mounts while one container holds it", got)
	}
	if err := v.Release(ctx, "s1", "c2"); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(root); len(left) > 0 || n.mounts(root) > 0 {
		t.Errorf("left: %v, %d mounts", left, n.mounts(root))
	}
	if err := n.st.Collect(ctx); err != nil {
		t.Error(err)
	}
	if _, err := v.Mount(ctx, "s1", "c1", n.img, pod.IDMap{}, ""); !errdefs.IsNotFound(err) {
		t.Errorf("mount of a removed image: %v", err)
	}
	if left, _ := os.ReadDir(root); len(left) > 0 {
		t.Errorf("left after a failure: %v", left)
	}
	if err := n.st.Collect(ctx); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(n.root, "*/snapshots/*")); len(left) > 0 {
		t.Errorf("left on disk: %v", left)
	}
}

// mapping is of a user namespace whose root is user 1000 of the node.
func mapping() pod.IDMap {
	ids := []*criv1.IDMapping{{HostId: 1000, ContainerId: 0, Length: 1000}}
	return pod.IDMap{UIDs: ids, GIDs: ids}
}

func owner(t *testing.T, path string) (uid, gid uint32) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Uid, st.Gid
}

func TestMappedOwners(t *testing.T) {
	for _, snapshotter := range []string{storage.Overlay, storage.Native, storage.Erofs} {
		for name, layers := range volumeLayers(t) {
			t.Run(snapshotter+" "+name, func(t *testing.T) {
				ctx := t.Context()
				n := newNode(t, snapshotter, v1.Config{}, layers...)
				v, r := NewVolumes(n.st, t.TempDir()), New(n.st)
				if !r.MapsIDs("") {
					t.Skip("the kernel does not map ids here")
				}
				plain, err := v.Mount(ctx, "s1", "c1", n.img, pod.IDMap{}, "")
				if err != nil {
					t.Fatal(err)
				}
				shifted, err := v.Mount(ctx, "s1", "c1", n.img, mapping(), "")
				if err != nil {
					t.Fatal(err)
				}
				for path, want := range map[string]uint32{plain: 0, shifted: 1000} {
					if uid, _ := owner(t, filepath.Join(path, "data/file")); uid != want+5 {
						t.Errorf("owner in %s: %d, want %d", path, uid, want+5)
					}
					if err := os.WriteFile(filepath.Join(path, "data/new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
						t.Errorf("write: %v, want a read-only file system", err)
					}
				}
				if err := v.Release(ctx, "s1", ""); err != nil {
					t.Error(err)
				}

				if _, err := r.Prepare(ctx, "c1", n.img, mapping()); err != nil {
					t.Fatal(err)
				}
				mounts, err := r.Mounts(ctx, "c1", snapshotter)
				if err != nil {
					t.Fatal(err)
				}
				err = mount.WithTempMount(ctx, mounts, func(dir string) error {
					if uid, gid := owner(t, dir); uid != 1000 || gid != 1000 {
						t.Errorf("owner of the root: %d:%d", uid, gid)
					}
					if uid, _ := owner(t, filepath.Join(dir, "data/file")); uid != 1005 {
						t.Errorf("owner of a file: %d", uid)
					}
					// The mapped root owns the folder, and what it makes is its own.
					inner, err := os.OpenRoot(filepath.Join(dir, "data"))
					if err != nil {
						return err
					}
					defer inner.Close()
					if err := asUser(1000, func() error { return inner.WriteFile("own", []byte("x"), 0o600) }); err != nil {
						return err
					}
					if uid, _ := owner(t, filepath.Join(dir, "data/own")); uid != 1000 {
						t.Errorf("owner of a new file: %d", uid)
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
				if err := r.Remove(ctx, "c1", snapshotter); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// asUser runs fn with the rights of a user to files.
func asUser(uid int, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		// The thread ends with the goroutine, since it is never unlocked.
		runtime.LockOSThread()
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETFSGID, uintptr(uid), 0, 0); errno != 0 {
			done <- errno
			return
		}
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(uid), 0, 0); errno != 0 {
			done <- errno
			return
		}
		done <- fn()
	}()
	return <-done
}

func TestFillVolumes(t *testing.T) {
	for _, snapshotter := range []string{storage.Overlay, storage.Native, storage.Erofs} {
		t.Run(snapshotter, func(t *testing.T) {
			ctx := t.Context()
			n := newNode(t, snapshotter, v1.Config{}, imagetest.Layer(t,
				imagetest.File{Name: "data/", Type: '5', Mode: 0o1750, UID: 7}, imagetest.File{Name: "data/file", Body: "content", Mode: 0o640, UID: 5},
				imagetest.File{Name: "data/link", Type: '2', Link: "/etc/passwd"}, imagetest.File{Name: "data/sub/", Type: '5'},
				imagetest.File{Name: "data/sub/x", Body: "x"}, imagetest.File{Name: "file", Body: "x"},
				imagetest.File{Name: "alias", Type: '2', Link: "/data"}, imagetest.File{Name: "out", Type: '2', Link: "../../../../../../usr"}),
				imagetest.Layer(t, imagetest.File{Name: "data/sub/.wh.x"}))
			r := New(n.st)
			if _, err := r.Prepare(ctx, "c1", n.img, pod.IDMap{}); err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			at := func(name string) string { return filepath.Join(dir, name) }
			folders := map[string]string{"/data": at("data"), "/alias": at("alias"), "/none": at("none"), "/out": at("out")}
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			must(os.Mkdir(at("data"), 0o755))
			must(r.FillVolumes(ctx, "c1", snapshotter, folders))
			for _, name := range []string{"data", "alias"} {
				fi, err := os.Stat(at(name))
				if err != nil || fi.Mode() != os.ModeDir|os.ModeSticky|0o750 {
					t.Errorf("mode of %s: %v %v", name, fi.Mode(), err)
				}
				if uid, _ := owner(t, at(name)); uid != 7 {
					t.Errorf("owner of %s: %d", name, uid)
				}
				if uid, _ := owner(t, at(name+"/file")); uid != 5 {
					t.Errorf("owner of %s/file: %d", name, uid)
				}
				if link, err := os.Readlink(at(name + "/link")); link != "/etc/passwd" {
					t.Errorf("link: %q %v", link, err)
				}
				if _, err := os.Lstat(at(name + "/sub/x")); err == nil {
					t.Error("a removed file was copied")
				}
			}
			// What leads out of the image shows nothing of the node.
			for _, name := range []string{"none", "out"} {
				if got, err := os.ReadDir(at(name)); err != nil || len(got) > 0 {
					t.Errorf("%s: %v %v", name, got, err)
				}
			}
			// The container's changes are not overwritten by a second start.
			must(os.WriteFile(at("data/file"), []byte("changed"), 0o600))
			must(r.FillVolumes(ctx, "c1", snapshotter, folders))
			if data, _ := os.ReadFile(at("data/file")); string(data) != "changed" {
				t.Errorf("filled twice: %q", data)
			}
			if err := r.FillVolumes(ctx, "c1", snapshotter, map[string]string{"/file": at("file")}); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("a file for a volume: %v", err)
			}
			if err := r.FillVolumes(ctx, "c2", snapshotter, folders); !errdefs.IsNotFound(err) {
				t.Errorf("unknown layer: %v", err)
			}
			must(r.Remove(ctx, "c1", snapshotter))
		})
	}
}

// An image that was pulled for one snapshotter is unpacked for another without the registry.
func TestUnpackForAnotherSnapshotter(t *testing.T) {
	ctx := t.Context()
	n := newNode(t, storage.Overlay, v1.Config{},
		imagetest.Layer(t, imagetest.File{Name: "a", Body: "a"}), imagetest.Layer(t, imagetest.File{Name: ".wh.a"}, imagetest.File{Name: "b", Body: "b"}))
	r := New(n.st)
	same, err := n.images.Unpack(ctx, n.img, "")
	if err != nil || same.Snapshotter != storage.Overlay {
		t.Errorf("default: %+v %v", same.Snapshotter, err)
	}
	for range 2 {
		native, err := n.images.Unpack(ctx, n.img, storage.Native)
		if err != nil || native.Snapshotter != storage.Native {
			t.Fatalf("native: %q %v", native.Snapshotter, err)
		}
		// What was unpacked is kept.
		if err := n.st.Collect(ctx); err != nil {
			t.Fatal(err)
		}
		mounts, err := r.Prepare(ctx, "c1", native, pod.IDMap{})
		if err != nil {
			t.Fatal(err)
		}
		err = mount.WithTempMount(ctx, mounts, func(dir string) error {
			if _, err := os.Stat(filepath.Join(dir, "a")); err == nil {
				t.Error("a removed file is there")
			}
			_, err := os.Stat(filepath.Join(dir, "b"))
			return err
		})
		if err != nil {
			t.Error(err)
		}
		if err := r.Remove(ctx, "c1", storage.Native); err != nil {
			t.Error(err)
		}
	}
	if _, err := n.images.Unpack(ctx, n.img, "unknown"); !errdefs.IsNotFound(err) {
		t.Errorf("unknown snapshotter: %v", err)
	}
	if err := n.images.Remove(ctx, &criv1.ImageSpec{Image: n.ref}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.images.Unpack(ctx, n.img, storage.Native); !errdefs.IsNotFound(err) {
		t.Errorf("removed image: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(n.root, "*/snapshots/*")); len(left) > 0 {
		t.Errorf("left on disk: %v", left)
	}
}
