package table

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// writeTime bounds one change of a record.
const writeTime = 30 * time.Second

// SaveSandbox writes a changed clone of the sandbox's record together with events, and
// shows it once it is durable. The write is not given up when ctx ends.
func (t *Table) SaveSandbox(ctx context.Context, s *Sandbox, change func(*recordv1.Sandbox), evs ...*recordv1.Event) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
	defer cancel()
	done, err := s.writing.Take(ctx)
	if err != nil {
		return err
	}
	defer done()
	next := proto.CloneOf(s.rec.Load())
	change(next)
	err = t.store.Update(ctx, func(tx *store.Tx) error {
		err := tx.PutSandbox(next)
		if err != nil {
			return err
		}
		return appendEvents(tx, evs...)
	})
	if err != nil {
		return fmt.Errorf("sandbox %q: %w", s.ID, err)
	}
	s.rec.Store(next)
	return nil
}

// SaveContainer is SaveSandbox for a container. The change names the events that belong to
// it; if it fails nothing is written.
func (t *Table) SaveContainer(ctx context.Context, c *Container, change func(*recordv1.Container) ([]*recordv1.Event, error)) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
	defer cancel()
	done, err := c.writing.Take(ctx)
	if err != nil {
		return err
	}
	defer done()
	next := proto.CloneOf(c.rec.Load())
	evs, err := change(next)
	if err != nil {
		return err
	}
	err = t.store.Update(ctx, func(tx *store.Tx) error {
		err := tx.PutContainer(next)
		if err != nil {
			return err
		}
		return appendEvents(tx, evs...)
	})
	if err != nil {
		return fmt.Errorf("container %q: %w", c.ID, err)
	}
	c.rec.Store(next)
	return nil
}

// DropSandbox deletes the record of a sandbox and forgets it. A network that is still owed
// a release gets a record of its own (nil for none), in the same transaction.
func (t *Table) DropSandbox(ctx context.Context, s *Sandbox, owed *recordv1.NetworkRelease, evs ...*recordv1.Event) error {
	err := t.store.Update(ctx, func(tx *store.Tx) error {
		if owed != nil {
			err := tx.PutRelease(owed)
			if err != nil {
				return err
			}
		}
		err := tx.DeleteSandbox(s.ID)
		if err != nil {
			return err
		}
		return appendEvents(tx, evs...)
	})
	if err != nil {
		return err
	}
	t.forgetSandbox(s, owed)
	return nil
}

// DropContainer deletes the record of a container and forgets it. The events are made from
// the last record, which nothing changes any more.
func (t *Table) DropContainer(ctx context.Context, c *Container, last func(*recordv1.Container) ([]*recordv1.Event, error)) error {
	done, err := c.writing.Take(ctx)
	if err != nil {
		return err
	}
	defer done()
	evs, err := last(c.rec.Load())
	if err != nil {
		return err
	}
	err = t.store.Update(ctx, func(tx *store.Tx) error {
		err := tx.DeleteContainer(c.ID)
		if err != nil {
			return err
		}
		return appendEvents(tx, evs...)
	})
	if err != nil {
		return err
	}
	t.ForgetContainer(c)
	return nil
}

// DropRelease deletes the record of an owed network release.
func (t *Table) DropRelease(ctx context.Context, sandboxID string) error {
	err := t.store.Update(ctx, func(tx *store.Tx) error { return tx.DeleteRelease(sandboxID) })
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.releases, sandboxID)
	return nil
}

// Append puts an event that belongs to no change of a record into the outbox.
func (t *Table) Append(ctx context.Context, ev *recordv1.Event) error {
	return t.store.Update(context.WithoutCancel(ctx), func(tx *store.Tx) error { return tx.AppendEvent(ev) })
}

// Load reads what the store holds, for Fill.
func (t *Table) Load() (store.Snapshot, error) { return t.store.Load() }

// appendEvents adds events to a transaction, in order.
func appendEvents(tx *store.Tx, evs ...*recordv1.Event) error {
	for _, ev := range evs {
		err := tx.AppendEvent(ev)
		if err != nil {
			return err
		}
	}
	return nil
}
