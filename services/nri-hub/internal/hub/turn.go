package hub

import (
	"context"
	"sync"
)

// queue lets one request at a time through to a plugin, in the order in which the
// requests have entered.
type queue struct {
	// mu guards waiting.
	mu      sync.Mutex
	waiting []*ticket // the first one has its turn
}

// ticket is a place in a queue. Who holds one must leave.
type ticket struct {
	q    *queue
	turn chan struct{}
}

// enter takes the next place. It does not block, so the order of requests can be fixed
// while the turn at the plugin before is still held.
func (q *queue) enter() *ticket {
	t := &ticket{q: q, turn: make(chan struct{})}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, t)
	if len(q.waiting) == 1 {
		close(t.turn)
	}
	return t
}

// wait returns nil once it is the ticket's turn, or an error when the context ends or
// the plugin is gone.
func (t *ticket) wait(ctx context.Context, gone <-chan struct{}) error {
	select {
	case <-t.turn:
		return nil
	case <-gone:
		return ErrLost
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// leave gives the place up, with or without having had the turn.
func (t *ticket) leave() {
	if t == nil {
		return
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	for i, w := range t.q.waiting {
		if w != t {
			continue
		}
		t.q.waiting = append(t.q.waiting[:i], t.q.waiting[i+1:]...)
		if i == 0 && len(t.q.waiting) > 0 {
			close(t.q.waiting[0].turn)
		}
		return
	}
}
