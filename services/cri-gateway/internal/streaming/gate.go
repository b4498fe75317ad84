package streaming

import "sync"

// gate counts who is inside, and lets nobody in once it is closed.
type gate struct {
	// mu guards closed, and orders enter against close.
	mu     sync.Mutex
	closed bool

	inside sync.WaitGroup
}

// enter reports whether the caller is let in; it must then leave.
func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.inside.Add(1)
	return true
}

func (g *gate) leave() { g.inside.Done() }

// close lets nobody in any more and waits until everybody has left.
func (g *gate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.inside.Wait()
}
