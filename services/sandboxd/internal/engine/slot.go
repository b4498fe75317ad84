package engine

import (
	"context"
	"time"
)

// undoTime bounds the undoing of one operation.
const undoTime = 2 * time.Minute

// slot lets operations on one object take turns. The zero value is not usable.
type slot chan struct{}

func newSlot() slot { return make(slot, 1) }

// take waits for the turn. The returned function gives it back.
func (s slot) take(ctx context.Context) (func(), error) {
	select {
	case s <- struct{}{}:
		return func() { <-s }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// undo runs fn under a context that outlives ctx, for clean-up after a failure.
func undo(ctx context.Context, fn func(ctx context.Context)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	fn(ctx)
}
