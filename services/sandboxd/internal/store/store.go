// Package store keeps sandboxd's durable records in one bbolt database.
//
// It promises: a call of Update that returned nil is on disk and all or nothing; several
// callers at once share one transaction and one sync (group commit), without waiting for
// each other longer than that; an unreadable record never stops Load. It is safe for
// concurrent use. It knows nothing of what the records mean. No other package touches the
// database.
package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// SchemaVersion is the version of the records' form that this program reads and writes.
const SchemaVersion = 1

var (
	bucketMeta       = []byte("meta")
	bucketSandboxes  = []byte("sandboxes")
	bucketContainers = []byte("containers")
	bucketReleases   = []byte("network_releases")
	bucketOutbox     = []byte("outbox")
	keySchema        = []byte("schema_version")
)

// Store is the open database. Close it when all callers have returned.
type Store struct {
	db      *bbolt.DB
	updates chan update
	done    chan struct{} // closed by Close: no further updates
	wg      sync.WaitGroup
	once    sync.Once

	appended chan struct{} // signals that the outbox may have grown
	makeRoom atomic.Pointer[func() bool]
}

type update struct {
	fn     func(*Tx) error
	result chan error
}

// Open opens the database at path and makes it if it is missing. It fails with
// ErrFailedPrecondition if the records were written by a newer version of the program and
// with ErrUnavailable if another process has the database open.
func Open(path string) (*Store, error) {
	err := os.MkdirAll(filepath.Dir(path), 0o700)
	if err != nil {
		return nil, fmt.Errorf("record store: %w", err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout:        5 * time.Second,
		NoFreelistSync: true,
		FreelistType:   bbolt.FreelistMapType,
	})
	if errors.Is(err, bbolt.ErrTimeout) { //nolint:staticcheck // the sentinel is re-exported by this package
		return nil, fmt.Errorf("record store %s: in use by another process: %w", path, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("record store %s: %w", path, err)
	}
	err = prepare(db)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("record store %s: %w", path, err), db.Close())
	}
	s := &Store{db: db, updates: make(chan update), done: make(chan struct{}), appended: make(chan struct{}, 1)}
	s.wg.Go(s.commitLoop)
	return s, nil
}

// OpenReadOnly opens a database for inspection. While a sandboxd runs it has the lock of its
// own, so that this fails after a second: open a Copy then.
func OpenReadOnly(path string) (*Store, error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, Timeout: time.Second})
	if err != nil {
		return nil, fmt.Errorf("record store %s: %w", path, err)
	}
	return &Store{db: db, done: make(chan struct{}), appended: make(chan struct{}, 1)}, nil
}

// prepare makes the buckets and checks the schema, writing only if it must, so that a full
// disk does not keep the process from starting.
func prepare(db *bbolt.DB) error {
	var found uint64
	err := db.View(func(tx *bbolt.Tx) error {
		if b := tx.Bucket(bucketMeta); b != nil {
			if v := b.Get(keySchema); len(v) == 8 {
				found = binary.BigEndian.Uint64(v)
			}
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case found > SchemaVersion:
		return fmt.Errorf("records have schema version %d, this program knows %d: upgrade it or move the records away: %w",
			found, SchemaVersion, errdefs.ErrFailedPrecondition)
	case found == SchemaVersion:
		return nil
	}
	return db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketSandboxes, bucketContainers, bucketReleases, bucketOutbox} {
			_, err := tx.CreateBucketIfNotExists(name)
			if err != nil {
				return err
			}
		}
		return tx.Bucket(bucketMeta).Put(keySchema, binary.BigEndian.AppendUint64(nil, SchemaVersion))
	})
}

// Close ends the commit loop and closes the database. Updates that come later fail with
// ErrUnavailable.
func (s *Store) Close() error {
	s.once.Do(func() { close(s.done) })
	s.wg.Wait()
	return s.db.Close()
}

// Update runs fn in a write transaction and returns after it is on disk. fn may run more
// than once and must have no effect but on the Tx. If ctx ends first, Update returns its
// cause, and the transaction may or may not happen.
func (s *Store) Update(ctx context.Context, fn func(*Tx) error) error {
	u := update{fn: fn, result: make(chan error, 1)}
	select {
	case s.updates <- u:
	case <-s.done:
		return fmt.Errorf("record store is closed: %w", errdefs.ErrUnavailable)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case err := <-u.result:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// commitLoop commits what is waiting in one transaction, again and again. While a sync is
// under way the next callers gather, so that the batch grows with the load and a lone
// caller waits for nobody.
func (s *Store) commitLoop() {
	for {
		var batch []update
		select {
		case <-s.done:
			return
		case u := <-s.updates:
			batch = append(batch, u)
		}
		for more := true; more; {
			select {
			case u := <-s.updates:
				batch = append(batch, u)
			default:
				more = false
			}
		}
		s.commit(batch)
	}
}

// commit runs a batch. An update that fails is answered alone and the rest is run again
// without it.
func (s *Store) commit(batch []update) {
	for len(batch) > 0 {
		failed := -1
		grew := false
		err := s.db.Update(func(btx *bbolt.Tx) error {
			tx := &Tx{tx: btx}
			for i, u := range batch {
				err := u.fn(tx)
				if err != nil {
					failed = i
					return err
				}
			}
			grew = tx.appended
			return nil
		})
		if failed >= 0 {
			batch[failed].result <- err
			batch = append(batch[:failed:failed], batch[failed+1:]...)
			continue
		}
		if errors.Is(err, syscall.ENOSPC) && s.madeRoom() {
			continue
		}
		if err != nil {
			err = fmt.Errorf("record store: %w", err)
		}
		for _, u := range batch {
			u.result <- err
		}
		if grew && err == nil {
			s.wake()
		}
		return
	}
}

// OnFull sets what is called when the disk is full. If it says that it made room, the
// transaction is run again.
func (s *Store) OnFull(makeRoom func() bool) { s.makeRoom.Store(&makeRoom) }

func (s *Store) madeRoom() bool {
	fn := s.makeRoom.Load()
	return fn != nil && (*fn)()
}

func (s *Store) wake() {
	select {
	case s.appended <- struct{}{}:
	default:
	}
}

// Snapshot is everything that was recorded.
type Snapshot struct {
	Sandboxes  []*recordv1.Sandbox
	Containers []*recordv1.Container
	Releases   []*recordv1.NetworkRelease
	// Broken are the keys of records that could not be read, by bucket name.
	Broken map[string][]string
}

// Load reads all records. A record that cannot be read is reported in Broken, not as an error.
func (s *Store) Load() (Snapshot, error) {
	snap := Snapshot{Broken: map[string][]string{}}
	err := s.db.View(func(tx *bbolt.Tx) error {
		snap.Sandboxes = loadAll(tx, bucketSandboxes, snap.Broken, func() *recordv1.Sandbox { return &recordv1.Sandbox{} })
		snap.Containers = loadAll(tx, bucketContainers, snap.Broken, func() *recordv1.Container { return &recordv1.Container{} })
		snap.Releases = loadAll(tx, bucketReleases, snap.Broken, func() *recordv1.NetworkRelease { return &recordv1.NetworkRelease{} })
		return nil
	})
	if err != nil {
		return Snapshot{}, fmt.Errorf("record store: %w", err)
	}
	return snap, nil
}

func loadAll[M proto.Message](tx *bbolt.Tx, bucket []byte, broken map[string][]string, empty func() M) []M {
	var out []M
	b := tx.Bucket(bucket)
	if b == nil {
		return nil
	}
	c := b.Cursor()
	for k, v := c.First(); k != nil; k, v = c.Next() {
		m := empty()
		err := proto.Unmarshal(v, m)
		if err != nil {
			broken[string(bucket)] = append(broken[string(bucket)], string(k))
			continue
		}
		out = append(out, m)
	}
	return out
}
