package store

import (
	"context"
	"encoding/binary"
	"fmt"

	"go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// Entry is an event in the outbox with its place in the order.
type Entry struct {
	Sequence uint64
	Event    *recordv1.Event
}

// Appended is signalled after events were appended. One signal may stand for many.
func (s *Store) Appended() <-chan struct{} { return s.appended }

// Events returns up to limit events of the outbox, oldest first. An entry that cannot be
// read has a nil Event.
func (s *Store) Events(limit int) ([]Entry, error) {
	var out []Entry
	err := s.db.View(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketOutbox).Cursor()
		for k, v := c.First(); k != nil && len(out) < limit; k, v = c.Next() {
			e := Entry{Sequence: binary.BigEndian.Uint64(k), Event: &recordv1.Event{}}
			err := proto.Unmarshal(v, e.Event)
			if err != nil {
				e.Event = nil
			}
			out = append(out, e)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: %w", err)
	}
	return out, nil
}

// EventCount returns the number of events in the outbox.
func (s *Store) EventCount() int {
	n := 0
	err := s.db.View(func(tx *bbolt.Tx) error {
		n = tx.Bucket(bucketOutbox).Stats().KeyN
		return nil
	})
	if err != nil {
		return 0
	}
	return n
}

// DropEvents removes events by their sequence numbers.
func (s *Store) DropEvents(ctx context.Context, sequences []uint64) error {
	return s.Update(ctx, func(t *Tx) error {
		b := t.tx.Bucket(bucketOutbox)
		for _, seq := range sequences {
			err := b.Delete(binary.BigEndian.AppendUint64(nil, seq))
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// ReplaceEvents removes events and puts one in the place of the first of them.
func (s *Store) ReplaceEvents(ctx context.Context, sequences []uint64, with *recordv1.Event) error {
	v, err := proto.Marshal(with)
	if err != nil {
		return err
	}
	return s.Update(ctx, func(t *Tx) error {
		b := t.tx.Bucket(bucketOutbox)
		for _, seq := range sequences {
			err := b.Delete(binary.BigEndian.AppendUint64(nil, seq))
			if err != nil {
				return err
			}
		}
		return b.Put(binary.BigEndian.AppendUint64(nil, sequences[0]), v)
	})
}
