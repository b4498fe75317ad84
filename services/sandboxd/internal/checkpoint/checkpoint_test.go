package checkpoint_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/checkpoint"
)

func write(t *testing.T, path, content string) {
	t.Helper()
	err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600))
	if err != nil {
		t.Fatal(err)
	}
}

// example is a pod checkpoint of one container, "c".
func example(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	p, err := checkpoint.NewPod("type", "binary", &criv1.PodSandboxConfig{}, []*recordv1.Container{
		{Id: "1", Config: &criv1.ContainerConfig{Metadata: &criv1.ContainerMetadata{Name: "c"}}},
	})
	if err == nil {
		err = p.Write(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(checkpoint.Images(checkpoint.Dir(dir, "c")), "pages-1.img"), "pages")
	write(t, checkpoint.RootfsDiff(checkpoint.Dir(dir, "c")), "diff")
	write(t, filepath.Join(checkpoint.Volumes(checkpoint.Dir(dir, "c")), "v", "file"), "data")
	return dir
}

func TestWhatWasWrittenIsReadBack(t *testing.T) {
	dir, to := example(t), t.TempDir()
	p, err := checkpoint.Read(dir)
	if err != nil || p.RuntimeType != "type" || p.RuntimeBinary != "binary" || len(p.Containers) != 1 {
		t.Fatalf("read %+v, %v", p, err)
	}
	if err := checkpoint.TakeImages(t.Context(), dir, "c", filepath.Join(to, "images")); err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.TakeVolumes(dir, "c", filepath.Join(to, "volumes")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"images/pages-1.img": "pages", "volumes/v/file": "data"} {
		if b, err := os.ReadFile(filepath.Join(to, path)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
	err = checkpoint.RootfsChanges(dir, "c", func(r io.Reader) error {
		b, err := io.ReadAll(r)
		if string(b) != "diff" {
			t.Errorf("changes are %q", b)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := checkpoint.Clear(dir); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestOddDescriptionsAreRefused(t *testing.T) {
	for name, content := range map[string]string{
		"empty": "", "no JSON": "x", "other version": `{"version": 99}`, "other architecture": `{"version": 1, "architecture": "vax"}`,
	} {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "pod.dump"), content)
		if _, err := checkpoint.Read(dir); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A checkpoint comes from anywhere: a link in it must not lead to a file of the node.
func TestLinksDoNotLeadOutOfACheckpoint(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	write(t, secret, "secret")
	dir := example(t)
	files := checkpoint.Dir(dir, "c")
	link := func(path, to string) {
		t.Helper()
		err := errors.Join(os.RemoveAll(path), os.Symlink(to, path))
		if err != nil {
			t.Fatal(err)
		}
	}
	link(checkpoint.RootfsDiff(files), secret)
	if err := checkpoint.RootfsChanges(dir, "c", func(io.Reader) error { return nil }); err == nil {
		t.Error("the changes are a file outside")
	}
	link(checkpoint.Images(files), filepath.Dir(secret))
	to := filepath.Join(t.TempDir(), "to")
	if err := checkpoint.TakeImages(t.Context(), dir, "c", to); err == nil {
		t.Error("the images are a folder outside")
	}
	link(checkpoint.Volumes(files), filepath.Dir(secret))
	if err := checkpoint.TakeVolumes(dir, "c", to); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("volumes outside: %v", err)
	}
	link(filepath.Join(dir, "pod.dump"), secret)
	if _, err := checkpoint.Read(dir); err == nil || strings.Contains(err.Error(), "invalid character") {
		t.Errorf("the description is a file outside: %v", err)
	}
}

func TestArchiveAppearsWholeOrNotAtAll(t *testing.T) {
	dir, to := example(t), t.TempDir()
	location := filepath.Join(to, "a.tar")
	if err := checkpoint.Archive(t.Context(), filepath.Join(dir, "no"), location); err == nil {
		t.Error("archive of nothing")
	}
	if left, err := os.ReadDir(to); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if err := checkpoint.Archive(t.Context(), dir, location); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(location)
	if err != nil || before.Size() == 0 || before.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", before, err)
	}
	if err := checkpoint.Archive(t.Context(), dir, location); !errdefs.IsAlreadyExists(err) {
		t.Errorf("over a file: %v", err)
	}
	if left, err := os.ReadDir(to); err != nil || len(left) != 1 {
		t.Errorf("files %v, %v", left, err)
	}
}
