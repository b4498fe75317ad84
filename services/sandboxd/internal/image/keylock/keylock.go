// Package keylock lets one at a time work on what a key stands for. Keys that nobody waits
// for take no memory. It knows nothing of what the keys mean.
package keylock

import (
	"context"
	"sync"
)

// Locks are locks by key. Its methods may be called concurrently.
type Locks struct {
	mu   sync.Mutex // mu guards held
	held map[string]*heldKey
}

type heldKey struct {
	free  chan struct{} // holds one value while nobody works
	users int
}

// New returns locks of which none is held.
func New() *Locks { return &Locks{held: make(map[string]*heldKey)} }

// Lock waits for the key. It fails only if ctx ends first.
func (l *Locks) Lock(ctx context.Context, key string) error {
	l.mu.Lock()
	h := l.held[key]
	if h == nil {
		h = &heldKey{free: make(chan struct{}, 1)}
		h.free <- struct{}{}
		l.held[key] = h
	}
	h.users++
	l.mu.Unlock()
	select {
	case <-h.free:
		return nil
	case <-ctx.Done():
		l.leave(key, h)
		return context.Cause(ctx)
	}
}

// Unlock gives the key to the next. Only who holds it may call it.
func (l *Locks) Unlock(key string) {
	l.mu.Lock()
	h := l.held[key]
	l.mu.Unlock()
	if h == nil {
		return
	}
	h.free <- struct{}{}
	l.leave(key, h)
}

func (l *Locks) leave(key string, h *heldKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.users--; h.users == 0 {
		delete(l.held, key)
	}
}
