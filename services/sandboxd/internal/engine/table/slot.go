package table

import "context"

// Slot lets operations on one object take turns. The zero value is not usable.
type Slot chan struct{}

func newSlot() Slot { return make(Slot, 1) }

// Take waits for the turn. The returned function gives it back. It fails with the cause of
// ctx when that ends first.
func (s Slot) Take(ctx context.Context) (func(), error) {
	select {
	case s <- struct{}{}:
		return func() { <-s }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
