package storage

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func open(t *testing.T, root string) *Storage {
	t.Helper()
	s, err := Open(t.Context(), Config{Root: root, Snapshotter: Native}, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func put(ctx context.Context, t *testing.T, s *Storage, data string) ocispec.Descriptor {
	t.Helper()
	desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: digest.FromString(data), Size: int64(len(data))}
	if err := content.WriteBlob(ctx, s.Content(), "put-"+data, bytes.NewReader([]byte(data)), desc); err != nil {
		t.Fatal(err)
	}
	return desc
}

func TestCollectKeepsWhatIsNeeded(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	ctx := s.Context(t.Context())
	leased, held1, err := s.Lease(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	named, held, loose := put(leased, t, s, "named"), put(leased, t, s, "held"), put(ctx, t, s, "loose")
	err = s.Update(ctx, func(ctx context.Context) error {
		_, err := s.Images().Create(ctx, images.Image{Name: "n", Target: named})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	file := func(d ocispec.Descriptor) bool {
		_, err := os.Stat(filepath.Join(root, "content/blobs/sha256", d.Digest.Encoded()))
		return err == nil
	}
	if err := s.Collect(ctx); err != nil {
		t.Fatal(err)
	}
	if !file(named) || !file(held) || file(loose) {
		t.Errorf("named %v, held %v, loose %v", file(named), file(held), file(loose))
	}
	if err := held1.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if err := held1.Release(ctx); err != nil {
		t.Errorf("second release: %v", err)
	}
	if err := s.Collect(ctx); err != nil {
		t.Fatal(err)
	}
	if !file(named) || file(held) {
		t.Errorf("named %v, held %v", file(named), file(held))
	}
}

func TestOpenSweeps(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	ctx, _, err := s.Lease(s.Context(t.Context()), "")
	if err != nil {
		t.Fatal(err)
	}
	desc := put(ctx, t, s, "half")
	sn, _, _ := s.Snapshotter("")
	if _, err := sn.Prepare(ctx, "half", ""); err != nil {
		t.Fatal(err)
	}
	// A file that the database does not know: the process ended between the two.
	stray := filepath.Join(root, "content/blobs/sha256", digest.FromString("stray").Encoded())
	if err := os.WriteFile(stray, []byte("stray"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, root)
	ctx = s.Context(t.Context())
	if s.BlobPresent(ctx, desc) {
		t.Error("blob of an interrupted pull is still there")
	}
	if _, err := os.Stat(stray); err == nil {
		t.Error("unknown blob is still there")
	}
	sn, _, _ = s.Snapshotter("")
	if _, err := sn.Stat(ctx, "half"); !errdefs.IsNotFound(err) {
		t.Errorf("snapshot of an interrupted pull: %v", err)
	}
	if fi, err := os.Stat(s.reservePath()); err != nil || fi.Size() != reserveSize {
		t.Errorf("reserve: %v %v", fi, err)
	}
}

func TestBlobIntact(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	ctx := s.Context(t.Context())
	desc := put(ctx, t, s, "content")
	if !s.BlobPresent(ctx, desc) || !s.BlobIntact(ctx, desc) {
		t.Fatal("fresh blob is not whole")
	}
	path := filepath.Join(root, "content/blobs/sha256", desc.Digest.Encoded())
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("cOntent"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !s.BlobPresent(ctx, desc) || s.BlobIntact(ctx, desc) {
		t.Error("changed content was not seen")
	}
	if err := os.Truncate(path, 3); err != nil {
		t.Fatal(err)
	}
	if s.BlobPresent(ctx, desc) {
		t.Error("changed size was not seen")
	}
	if err := s.Discard(ctx, desc.Digest); err != nil {
		t.Fatal(err)
	}
	put(ctx, t, s, "content")
	if !s.BlobIntact(ctx, desc) {
		t.Error("blob is not whole after it was discarded and written again")
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, cfg := range []Config{{Root: "relative"}, {Root: t.TempDir(), Snapshotter: "zfs"}} {
		if _, err := Open(t.Context(), cfg, quiet()); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func TestUsage(t *testing.T) {
	s := open(t, t.TempDir())
	put(s.Context(t.Context()), t, s, "12345")
	usage, err := s.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range usage {
		if u.At.IsZero() {
			t.Errorf("%s was never measured", u.Snapshotter)
		}
		if u.Snapshotter == Native && (u.Images.Size != 5 || u.Images.Inodes != 1) {
			t.Errorf("images use %+v", u.Images)
		}
	}
}

func TestCollector(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs atomic.Int64
		fail := errors.New("fail")
		c := startCollector(t.Context(), func(context.Context) error {
			runs.Add(1)
			time.Sleep(time.Second)
			return fail
		}, quiet())
		c.soon()
		c.soon()
		time.Sleep(time.Minute)
		if runs.Load() != 1 {
			t.Errorf("%d runs for removals that came together", runs.Load())
		}
		results := make(chan error, 3)
		for range 3 {
			go func() { results <- c.now(t.Context()) }()
		}
		for range 3 {
			if err := <-results; !errors.Is(err, fail) {
				t.Errorf("result %v", err)
			}
		}
		if runs.Load() > 3 {
			t.Errorf("%d runs", runs.Load())
		}
		// Who asks during a run waits for the next one.
		go func() { results <- c.now(t.Context()) }()
		time.Sleep(100 * time.Millisecond)
		before := runs.Load()
		if err := c.now(t.Context()); !errors.Is(err, fail) || runs.Load() != before+1 {
			t.Errorf("result %v of run %d, wanted %d", err, runs.Load(), before+1)
		}
		if err := <-results; !errors.Is(err, fail) {
			t.Errorf("result %v", err)
		}
		before = runs.Load()
		time.Sleep(collectInterval + time.Minute)
		if runs.Load() != before+1 {
			t.Errorf("%d runs without removals", runs.Load()-before)
		}
		c.stop()
		if err := c.now(t.Context()); !errdefs.IsUnavailable(err) {
			t.Errorf("after stop: %v", err)
		}
	})
}

// A process that is killed while it makes a snapshot leaves a folder of a number that is
// given again to the next snapshot.
func TestOpenRemovesFoldersOfSnapshotsThatWereNeverRecorded(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	ctx := s.Context(t.Context())
	sn, _, _ := s.Snapshotter("")
	if _, err := sn.Prepare(ctx, "kept", ""); err != nil {
		t.Fatal(err)
	}
	mounts, err := sn.Mounts(ctx, "kept")
	if err != nil {
		t.Fatal(err)
	}
	// Without a lease or a label only the next opening would remove it: make it needed.
	if _, err := sn.Update(ctx, snapshots.Info{Name: "kept", Labels: map[string]string{"containerd.io/gc.root": "true"}}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for name := range s.backends {
		for n := range 50 {
			dir := filepath.Join(root, name, "snapshots", strconv.Itoa(n))
			if _, err := os.Stat(dir); err == nil {
				continue
			}
			if err := os.MkdirAll(filepath.Join(dir, "fs"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	s = open(t, root)
	ctx = s.Context(t.Context())
	for name := range s.backends {
		sn, _, _ := s.Snapshotter(name)
		if _, err := sn.Prepare(ctx, "next", ""); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := os.Stat(mounts[0].Source); err != nil {
		t.Errorf("the recorded snapshot: %v", err)
	}
}
