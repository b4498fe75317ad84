package backend

import (
	"context"
	"sync"
)

// passing are the operations that went by the hub, because no plugin listened or no hub
// was there, and that sandboxd's inventory does not show yet. A plugin that joins would
// hear of such an object neither from the inventory nor by an event, so the inventory
// waits for them. Later operations see the new state and are not waited for.
type passing struct {
	mu   sync.Mutex
	open map[*passer]struct{} // guarded by mu
}

// passer is one operation; it is open from the moment it goes by the hub until its end.
type passer struct {
	of   *passing
	done chan struct{}
}

// passerKey is the key of a hub's passer in a context.
type passerKey struct{ of *passing }

// Begin marks the begin of an operation whose outcome the inventory will show. end must be
// called when it does, or when the operation has failed.
func (h *Hub) Begin(ctx context.Context) (_ context.Context, end func()) {
	p := &passer{of: &h.passing, done: make(chan struct{})}
	var once sync.Once
	return context.WithValue(ctx, passerKey{&h.passing}, p), func() { once.Do(p.leave) }
}

// goBy opens the operation of ctx, if it is one that began with Begin.
func (h *Hub) goBy(ctx context.Context) {
	p, ok := ctx.Value(passerKey{&h.passing}).(*passer)
	if !ok {
		return
	}
	p.of.mu.Lock()
	defer p.of.mu.Unlock()
	if p.of.open == nil {
		p.of.open = map[*passer]struct{}{}
	}
	p.of.open[p] = struct{}{}
}

func (p *passer) leave() {
	p.of.mu.Lock()
	delete(p.of.open, p)
	p.of.mu.Unlock()
	close(p.done)
}

// wait returns when every operation that is open now has ended.
func (a *passing) wait(ctx context.Context) error {
	a.mu.Lock()
	open := make([]*passer, 0, len(a.open))
	for p := range a.open {
		open = append(open, p)
	}
	a.mu.Unlock()
	for _, p := range open {
		select {
		case <-p.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
