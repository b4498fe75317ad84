// Package prepared is the way out of a preparation, the same for sandboxes and containers: what
// was prepared, and no list shows yet, is entered for its commit, or undone.
//
// An undoing that fails is repeated in the background until it succeeds: the session that
// prepared the object may live for weeks, and the object's name must become free.
package prepared

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
)

// Object is a sandbox or a container of the table.
type Object interface {
	// Common is the part that both have.
	Common() *table.Object
	// Preparing says whether the object is neither committed nor stopped.
	Preparing() bool
}

// Kind says how the objects of one kind are found and destroyed. All must be set.
type Kind[T Object] struct {
	// Name is the kind in words, such as "sandbox".
	Name string
	// Find finds an object by its full id. Errors: ErrNotFound.
	Find func(id string) (T, error)
	// Destroy removes every part of an object that was never committed, and takes it out of
	// the table. It is called in the object's turn and can be repeated after an error.
	Destroy func(ctx context.Context, object T) error

	Table *table.Table
	Work  *work.Group
	Log   *slog.Logger
}

// Enter finds an object that is to be committed and takes its turn; done gives the turn back.
// Errors: ErrUnavailable while the state is incomplete and for an unknown id, whose
// preparation was lost.
func (k Kind[T]) Enter(ctx context.Context, id string) (object T, done func(), err error) {
	err = k.Table.Ready()
	if err != nil {
		return object, nil, err
	}
	object, err = k.Find(id)
	if err != nil {
		return object, nil, table.PreparationLost(err)
	}
	done, err = object.Common().Turn.Take(ctx)
	return object, done, err
}

// Undo destroys an object whose preparation has failed. The caller has the turn.
func (k Kind[T]) Undo(ctx context.Context, object T) {
	work.Undo(ctx, func(ctx context.Context) {
		err := k.Destroy(ctx, object)
		if err != nil {
			k.Log.WarnContext(ctx, "undo of a preparation is incomplete", k.attr(object), slog.Any("error", err))
			k.Doom(object)
		}
	})
}

// Abort undoes a preparation that has succeeded. An unknown id is not an error; a committed
// object is left alone with ErrFailedPrecondition.
func (k Kind[T]) Abort(ctx context.Context, id string) error {
	object, err := k.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	done, err := object.Common().Turn.Take(ctx)
	if err != nil {
		return err
	}
	defer done()
	if !object.Preparing() {
		return fmt.Errorf("%s %q is committed: %w", k.Name, id, errdefs.ErrFailedPrecondition)
	}
	if _, err := k.Find(id); err != nil {
		return nil // undone by a call that had its turn before
	}
	err = k.Destroy(ctx, object)
	if err != nil {
		k.Doom(object)
	}
	return err
}

// Doom aborts an object in the background, once the state is complete, until that succeeds.
func (k Kind[T]) Doom(object T) {
	if !object.Common().Doom() {
		return
	}
	k.Work.Go(func(ctx context.Context) {
		select {
		case <-k.Table.Complete():
		case <-ctx.Done():
			return
		}
		k.Work.Insist(ctx, "remove half-made "+k.Name, k.attr(object), func(ctx context.Context) error {
			return k.Abort(ctx, object.Common().ID)
		})
	})
}

func (k Kind[T]) attr(object T) slog.Attr { return slog.String(k.Name+"_id", object.Common().ID) }
