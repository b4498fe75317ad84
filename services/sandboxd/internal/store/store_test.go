package store

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func open(t *testing.T, path string) *Store {
	t.Helper()
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := s.Close()
		if err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestRecordsSurviveReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "records.db")
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	err = s.Update(t.Context(), func(tx *Tx) error {
		return errors.Join(
			tx.PutSandbox(&recordv1.Sandbox{Id: "s1", NetnsPath: "/x"}),
			tx.PutContainer(&recordv1.Container{Id: "c1", SandboxId: "s1"}),
			tx.PutContainer(&recordv1.Container{Id: "c2", SandboxId: "s1"}),
			tx.DeleteContainer("c2"),
			tx.PutRelease(&recordv1.NetworkRelease{SandboxId: "gone"}),
		)
	})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Close()
	if err != nil {
		t.Fatal(err)
	}
	snap, err := open(t, path).Load()
	if err != nil {
		t.Fatal(err)
	}
	if len(snap.Sandboxes) != 1 || snap.Sandboxes[0].GetNetnsPath() != "/x" {
		t.Errorf("sandboxes = %v", snap.Sandboxes)
	}
	if len(snap.Containers) != 1 || snap.Containers[0].GetId() != "c1" {
		t.Errorf("containers = %v", snap.Containers)
	}
	if len(snap.Releases) != 1 || len(snap.Broken) != 0 {
		t.Errorf("releases = %v, broken = %v", snap.Releases, snap.Broken)
	}
}

func TestFailedUpdateLeavesNothingAndHarmsNobody(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "records.db"))
	wrong := errors.New("wrong")
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			err := s.Update(t.Context(), func(tx *Tx) error {
				err := tx.PutSandbox(&recordv1.Sandbox{Id: fmt.Sprintf("s%02d", i)})
				if i%5 == 0 {
					return errors.Join(err, wrong)
				}
				return err
			})
			if got, want := errors.Is(err, wrong), i%5 == 0; got != want {
				t.Errorf("update %d: error = %v", i, err)
			}
		})
	}
	wg.Wait()
	snap, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	if len(snap.Sandboxes) != 40 {
		t.Errorf("%d sandboxes recorded, want 40", len(snap.Sandboxes))
	}
}

func TestBrokenRecordIsReported(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "records.db"))
	err := s.Update(t.Context(), func(tx *Tx) error {
		return errors.Join(tx.PutSandbox(&recordv1.Sandbox{Id: "good"}),
			tx.tx.Bucket(bucketSandboxes).Put([]byte("bad"), []byte{0xff, 0xff, 0xff}))
	})
	if err != nil {
		t.Fatal(err)
	}
	snap, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	if len(snap.Sandboxes) != 1 || len(snap.Broken["sandboxes"]) != 1 {
		t.Errorf("sandboxes = %v, broken = %v", snap.Sandboxes, snap.Broken)
	}
}

func TestNewerSchemaIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "records.db")
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket(bucketMeta)
		if err != nil {
			return err
		}
		return b.Put(keySchema, []byte{0, 0, 0, 0, 0, 0, 0, SchemaVersion + 1})
	})
	if err = errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	_, err = Open(path)
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("error = %v, want failed precondition", err)
	}
}

func TestOutboxKeepsOrder(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "records.db"))
	for i := range 10 {
		err := s.Update(t.Context(), func(tx *Tx) error {
			return tx.AppendEvent(&recordv1.Event{MessageId: fmt.Sprint(i)})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-s.Appended():
	default:
		t.Error("no signal after events were appended")
	}
	entries, err := s.Events(4)
	if err != nil {
		t.Fatal(err)
	}
	var seqs []uint64
	for i, e := range entries {
		if e.Event.GetMessageId() != fmt.Sprint(i) {
			t.Errorf("entry %d is event %s", i, e.Event.GetMessageId())
		}
		seqs = append(seqs, e.Sequence)
	}
	err = s.DropEvents(t.Context(), seqs)
	if err != nil {
		t.Fatal(err)
	}
	if n := s.EventCount(); n != 6 {
		t.Errorf("%d events left, want 6", n)
	}
	entries, err = s.Events(1)
	if err != nil || entries[0].Event.GetMessageId() != "4" {
		t.Errorf("first left = %v, %v; want 4", entries, err)
	}
}

func TestUpdateAfterCloseFails(t *testing.T) {
	s, err := Open(filepath.Join(t.TempDir(), "records.db"))
	if err != nil {
		t.Fatal(err)
	}
	err = s.Close()
	if err != nil {
		t.Fatal(err)
	}
	err = s.Update(t.Context(), func(*Tx) error { return nil })
	if !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("error = %v, want unavailable", err)
	}
}
