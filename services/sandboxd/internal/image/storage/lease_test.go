package storage

import (
	"context"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
)

// begin writes the first bytes of a blob.
func begin(t *testing.T, s *Storage, work, ref string) *Held {
	t.Helper()
	ctx, held, err := s.Lease(s.Context(t.Context()), work)
	if err != nil {
		t.Fatal(err)
	}
	w, err := content.OpenWriter(ctx, s.Content(), content.WithRef(ref))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte("begun")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	put(ctx, t, s, "whole "+ref)
	return held
}

func begun(t *testing.T, s *Storage) (partial int, whole int) {
	t.Helper()
	ctx := s.Context(t.Context())
	st, err := s.Content().ListStatuses(ctx)
	if err != nil {
		t.Fatal(err)
	}
	err = s.Content().Walk(ctx, func(content.Info) error { whole++; return nil })
	if err != nil {
		t.Fatal(err)
	}
	return len(st), whole
}

func collect(t *testing.T, s *Storage) {
	t.Helper()
	if err := s.Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestKeptWork(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	ctx := s.Context(t.Context())
	kept := begin(t, s, "one", "a")
	dropped := begin(t, s, "two", "b")
	begin(t, s, "three", "c") // neither released nor kept, as a killed process leaves it
	nameless := begin(t, s, "", "d")
	for _, err := range []error{kept.Keep(ctx), dropped.Release(ctx), nameless.Keep(ctx)} {
		if err != nil {
			t.Error(err)
		}
	}
	collect(t, s)
	if partial, whole := begun(t, s); partial != 2 || whole != 2 {
		t.Errorf("%d partial and %d whole blobs, want 2 and 2", partial, whole)
	}
	usage, err := s.Usage(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range usage {
		if u.Snapshotter == s.DefaultSnapshotter() && (u.Images.Size != int64(2*len("begun")+2*len("whole a")) || u.Images.Inodes < 4) {
			t.Errorf("usage %+v", u)
		}
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = open(t, root)
		if partial, whole := begun(t, s); partial != 2 || whole != 2 {
			t.Errorf("after a restart %d partial and %d whole blobs, want 2 and 2", partial, whole)
		}
	}
	// Another piece of work takes nothing up.
	ctx = s.Context(t.Context())
	_, other, err := s.Lease(ctx, "four")
	if err != nil || other.Resumed {
		t.Fatalf("other work: %v %v", other, err)
	}
	_, again, err := s.Lease(ctx, "one")
	if err != nil || !again.Resumed {
		t.Fatalf("second attempt: %v %v", again, err)
	}
	// What is taken up is not given up.
	if err := s.DropKept(ctx); err != nil {
		t.Fatal(err)
	}
	collect(t, s)
	if partial, whole := begun(t, s); partial != 1 || whole != 1 {
		t.Errorf("%d partial and %d whole blobs, want 1 and 1", partial, whole)
	}
	if err := again.Release(ctx); err != nil {
		t.Fatal(err)
	}
	collect(t, s)
	if partial, whole := begun(t, s); partial != 0 || whole != 0 {
		t.Errorf("%d partial and %d whole blobs are left", partial, whole)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestKeptWorkExpires(t *testing.T) {
	root := t.TempDir()
	s := open(t, root)
	ctx := s.Context(t.Context())
	for _, work := range []string{"one", "two"} {
		if err := begin(t, s, work, work).Keep(ctx); err != nil {
			t.Fatal(err)
		}
	}
	all, err := s.leases.List(ctx)
	if err != nil || len(all) != 2 {
		t.Fatalf("leases %v %v", all, err)
	}
	for _, l := range all {
		until, err := time.Parse(time.RFC3339, l.Labels[labelExpire])
		if left := time.Until(until); err != nil || left < KeepLife-time.Minute || left > KeepLife {
			t.Errorf("kept for %v, %v", left, err)
		}
	}
	// As if an hour had passed.
	err = s.Update(ctx, func(ctx context.Context) error {
		return s.keep(ctx, all[0], time.Now().Add(time.Second), func(leases.Resource) bool { return true })
	})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(1100 * time.Millisecond)
	collect(t, s)
	if partial, whole := begun(t, s); partial != 1 || whole != 1 {
		t.Errorf("%d partial and %d whole blobs, want 1 and 1", partial, whole)
	}
	// A restart does not make it any longer.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, root)
	after, err := s.leases.List(s.Context(t.Context()))
	if err != nil || len(after) != 1 || after[0].Labels[labelExpire] != all[1].Labels[labelExpire] {
		t.Errorf("leases after a restart: %v %v, before %v", after, err, all[1])
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
