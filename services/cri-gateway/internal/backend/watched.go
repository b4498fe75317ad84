package backend

import (
	"context"
	"sync"
	"time"
)

// watched is a value whose changes can be waited for.
type watched[T any] struct {
	// mu guards everything below.
	mu      sync.Mutex
	value   T
	changed chan struct{}
}

func (w *watched[T]) init(value T) {
	w.value, w.changed = value, make(chan struct{})
}

// get returns the value and a channel that is closed at its next change.
func (w *watched[T]) get() (T, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.value, w.changed
}

// update changes the value by f, which reports whether it did, and wakes who waits.
func (w *watched[T]) update(f func(*T) bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !f(&w.value) {
		return false
	}
	close(w.changed)
	w.changed = make(chan struct{})
	return true
}

// waitChange waits for a change, at most d. The error is the cause of ctx's end.
func waitChange(ctx context.Context, changed <-chan struct{}, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

const (
	firstRetry = 20 * time.Millisecond
	lastRetry  = time.Second
)

// backoff is the growing pause between tries. It is used by one goroutine.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: firstRetry} }

func (b *backoff) reset() { b.next = firstRetry }

// wait pauses, or returns at the end of ctx.
func (b *backoff) wait(ctx context.Context) {
	timer := time.NewTimer(b.next)
	defer timer.Stop()
	b.next = min(2*b.next, lastRetry)
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
