package store

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// A copy that is made while the owner writes is a state that was committed: here, in every
// commit all records have the same text.
func TestCopyOfADatabaseInUseIsConsistent(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "records.db")
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	put := func(ctx context.Context, round int) error {
		return s.Update(ctx, func(tx *Tx) error {
			for i := range 100 {
				err := tx.PutSandbox(&recordv1.Sandbox{Id: fmt.Sprintf("%064d", i), BootId: fmt.Sprintf("round %d", round)})
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := put(ctx, 0); err != nil {
		t.Fatal(err)
	}
	writer.Go(func() {
		for round := 1; ctx.Err() == nil; round++ {
			_ = put(ctx, round)
		}
	})
	for range 20 {
		copied := filepath.Join(dir, "copy.db")
		if err := Copy(t.Context(), path, copied); err != nil {
			t.Fatal(err)
		}
		r, err := OpenReadOnly(copied)
		if err != nil {
			t.Fatal(err)
		}
		snap, err := r.Load()
		if err != nil {
			t.Fatal(err)
		}
		if len(snap.Sandboxes) != 100 || len(snap.Broken) != 0 {
			t.Fatalf("the copy has %d records, broken %v", len(snap.Sandboxes), snap.Broken)
		}
		for _, rec := range snap.Sandboxes {
			if rec.GetBootId() != snap.Sandboxes[0].GetBootId() {
				t.Fatalf("the copy mixes %q and %q", rec.GetBootId(), snap.Sandboxes[0].GetBootId())
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	writer.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
