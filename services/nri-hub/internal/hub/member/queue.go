package member

import (
	"context"
	"sync"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Queue lets requests through to a plugin in the order in which they have entered: one
// at a time, or as many as width says.
type Queue struct {
	// width is how many have their turn at once; less than one means one. It does not
	// change.
	width int

	// mu guards waiting.
	mu      sync.Mutex
	waiting []*Ticket // the first ones, as many as width, have their turn
}

// Ticket is a place in a queue. Who holds one must leave.
type Ticket struct {
	q    *Queue
	turn chan struct{}
}

func (q *Queue) slots() int { return max(q.width, 1) }

// Enter takes the next place. It does not block, so the order of requests can be fixed
// while the turn at the plugin before is still held.
func (q *Queue) Enter() *Ticket {
	t := &Ticket{q: q, turn: make(chan struct{})}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, t)
	if len(q.waiting) <= q.slots() {
		close(t.turn)
	}
	return t
}

// Length is how many have their turn or wait for it.
func (q *Queue) Length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

// Wait returns nil once it is the ticket's turn, or an error when the context ends, the
// plugin is gone or it has become degraded.
func (t *Ticket) Wait(ctx context.Context, gone, degraded <-chan struct{}) error {
	select {
	case <-gone:
		return plug.ErrLost
	case <-degraded:
		return ErrDegraded
	default:
	}
	select {
	case <-t.turn:
		return nil
	case <-gone:
		return plug.ErrLost
	case <-degraded:
		return ErrDegraded
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Leave gives the place up, with or without having had the turn.
func (t *Ticket) Leave() {
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
		if n := t.q.slots(); i < n && len(t.q.waiting) >= n {
			close(t.q.waiting[n-1].turn)
		}
		return
	}
}
