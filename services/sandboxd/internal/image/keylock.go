package image

import (
	"context"
	"sync"
)

// keyLock lets one at a time work on what a key stands for, such as a blob or a layer. The
// unpacker takes it so that pulls which share a layer fetch and extract it once.
type keyLock struct {
	mu   sync.Mutex // mu guards held
	held map[string]*heldKey
}

type heldKey struct {
	free  chan struct{} // holds one value while nobody works
	users int
}

func newKeyLock() *keyLock { return &keyLock{held: make(map[string]*heldKey)} }

// Lock waits for the key. It fails only if ctx ends first.
func (l *keyLock) Lock(ctx context.Context, key string) error {
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

// Unlock gives the key to the next.
func (l *keyLock) Unlock(key string) {
	l.mu.Lock()
	h := l.held[key]
	l.mu.Unlock()
	if h == nil {
		return
	}
	h.free <- struct{}{}
	l.leave(key, h)
}

func (l *keyLock) leave(key string, h *heldKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.users--; h.users == 0 {
		delete(l.held, key)
	}
}
