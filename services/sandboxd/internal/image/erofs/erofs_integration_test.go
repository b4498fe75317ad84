//go:build integration

package erofs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/extract"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func open(t *testing.T, root string) *Snapshotter {
	t.Helper()
	if err := Supported(); err != nil {
		testkit.Lacks(t, err.Error())
	}
	s, err := New(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mount.UnmountRecursive(root, unix.MNT_DETACH) })
	return s
}

// layer commits a layer with one file.
func layer(t *testing.T, s *Snapshotter, name, parent string) {
	t.Helper()
	mounts, err := s.Prepare(t.Context(), name+"-", "")
	if err != nil || len(mounts) != 1 || mounts[0].Type != "bind" {
		t.Fatalf("prepared: %v %v", mounts, err)
	}
	if err := os.WriteFile(filepath.Join(mounts[0].Source, name), []byte(name), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(t.Context(), name, name+"-", snapshots.WithParent(parent)); err != nil {
		t.Fatal(err)
	}
}

// mounted lists the layers that are mounted, by the names of their folders.
func mounted(t *testing.T, root string) []string {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(data)) {
		if at := strings.Fields(line)[4]; strings.HasPrefix(at, root+"/") {
			out = append(out, filepath.Base(filepath.Dir(at)))
		}
	}
	slices.Sort(out)
	return out
}

func want(t *testing.T, what string, got, want []string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// without lists all snapshots but one.
type without struct {
	*Snapshotter
	key string
}

func (w without) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	return w.Snapshotter.Walk(ctx, func(ctx context.Context, info snapshots.Info) error {
		if info.Name == w.key {
			return nil
		}
		return fn(ctx, info)
	}, filters...)
}

// names lists what shows in mounts.
func names(t *testing.T, mounts []mount.Mount) (out []string) {
	t.Helper()
	err := mount.WithTempMount(t.Context(), mounts, func(root string) error {
		entries, err := os.ReadDir(root)
		for _, e := range entries {
			out = append(out, e.Name())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Each layer is mounted once, while something is on top of it, and again when it is needed.
func TestLayersAreMountedWhileTheyAreUsed(t *testing.T) {
	ctx := t.Context()
	root := t.TempDir()
	s := open(t, root)
	layer(t, s, "a", "")
	layer(t, s, "b", "a")
	want(t, "mounted of layers alone", mounted(t, root), nil)

	kinds := map[string]func(key, parent string) ([]mount.Mount, error){
		"overlay a":   func(key, parent string) ([]mount.Mount, error) { return s.Prepare(ctx, key, parent) },
		"overlay a b": func(key, parent string) ([]mount.Mount, error) { return s.Prepare(ctx, key, parent) },
		"bind a":      func(key, parent string) ([]mount.Mount, error) { return s.View(ctx, key, parent) },
		"ro a b":      func(key, parent string) ([]mount.Mount, error) { return s.View(ctx, key, parent) },
	}
	for kind, make := range kinds {
		words := strings.Fields(kind)
		mounts, err := make(kind, words[len(words)-1])
		if err != nil || len(mounts) != 1 {
			t.Fatalf("%s: %v %v", kind, mounts, err)
		}
		if plain := mounts[0].Type == "overlay" || mounts[0].Type == "bind"; !plain {
			t.Errorf("%s: type %q", kind, mounts[0].Type)
		}
		want(t, kind, names(t, mounts), words[1:])
	}
	want(t, "mounted for four snapshots", mounted(t, root), []string{"1", "2"})

	// As after a reboot.
	for _, id := range []string{"1", "2"} {
		if err := Hide(Folder(root, id)); err != nil {
			t.Fatal(err)
		}
	}
	mounts, err := s.Mounts(ctx, "overlay a b")
	if err != nil {
		t.Fatal(err)
	}
	want(t, "after a reboot", names(t, mounts), []string{"a", "b"})

	// A process that was killed leaves mounts to the next one.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, root)
	for _, kind := range []string{"overlay a b", "ro a b", "bind a"} {
		if err := s.Remove(ctx, kind); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Cleanup(ctx); err != nil {
		t.Fatal(err)
	}
	want(t, "mounted for a container on the lower one", mounted(t, root), []string{"1"})
	if err := s.Remove(ctx, "overlay a"); err != nil {
		t.Fatal(err)
	}
	info, err := s.Stat(ctx, "b")
	if err != nil {
		t.Fatal(err)
	}
	folder := info.Labels[extract.FolderLabel]
	release, err := s.Hold(ctx, []string{folder})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Cleanup(ctx); err != nil {
		t.Fatal(err)
	}
	want(t, "mounted for its reader", mounted(t, root), []string{filepath.Base(filepath.Dir(folder))})
	release()
	// A stop before the collection: of two snapshots one is needed still.
	for key, parent := range map[string]string{"needed": "a", "removed": "b"} {
		if _, err := s.Prepare(ctx, key, parent); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.HideRest(ctx, without{s, "removed"}); err != nil {
		t.Fatal(err)
	}
	want(t, "mounted after a stop", mounted(t, root), []string{"1"})
	if err := errors.Join(s.Remove(ctx, "needed"), s.Remove(ctx, "removed")); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(ctx, "b"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Remove(ctx, "a"), s.Close()); err != nil {
		t.Fatal(err)
	}
	want(t, "mounted at the end", mounted(t, root), nil)
	if left, _ := os.ReadDir(filepath.Join(root, "snapshots")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A layer whose file is gone is not shown as an empty one.
func TestLostFile(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	defer s.Close()
	layer(t, s, "a", "")
	if err := os.Remove(Blob(Folder(root, "1"))); err != nil {
		t.Fatal(err)
	}
	if mounts, err := s.Prepare(t.Context(), "c", "a"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("prepared: %v %v", mounts, err)
	}
	if _, err := s.Stat(t.Context(), "c"); !errdefs.IsNotFound(err) {
		t.Errorf("left of it: %v", err)
	}
	err := s.Renew(t.Context(), Folder(root, "1"), func() error {
		return os.WriteFile(filepath.Join(Folder(root, "1"), "again"), nil, 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := s.View(t.Context(), "v", "a")
	if err != nil {
		t.Fatal(err)
	}
	want(t, "made again", names(t, mounts), []string{"again"})
}

// A program that ends with an error, or is told to, leaves no file that passes for a layer.
func TestFailedPacking(t *testing.T) {
	stopped, stop := context.WithCancel(t.Context())
	stop()
	for name, c := range map[string]struct {
		script string
		ctx    context.Context
		err    error
	}{
		"full":    {`echo begun > "$3"; echo "write: No space left on device" >&2; exit 1`, t.Context(), unix.ENOSPC},
		"failed":  {`echo begun > "$3"; exit 1`, t.Context(), errdefs.ErrInternal},
		"stopped": {`exec true`, stopped, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			bin := t.TempDir()
			if err := os.WriteFile(filepath.Join(bin, Program), []byte("#!/bin/sh\n"+c.script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
			folder := filepath.Join(t.TempDir(), "fs")
			if err := os.Mkdir(folder, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := pack(c.ctx, folder); !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			if left, _ := os.ReadDir(filepath.Dir(folder)); len(left) != 1 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func TestMissingProgram(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := New(t.TempDir()); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "erofs-utils") {
		t.Errorf("error %v, want one that names the package", err)
	}
}
