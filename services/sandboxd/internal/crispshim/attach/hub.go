package attach

import (
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// queueLength is how many chunks wait for a client.
	queueLength = 32
	// patience is how long a client may hold its container up in all. It grows with the time
	// that the client is there, by one part in patienceGrowth.
	patience       = 2 * time.Second
	patienceGrowth = 20
)

// errTooSlow is why a client was disconnected that held up its container.
var errTooSlow = fmt.Errorf("attached client reads too slowly: %w", errdefs.ErrResourceExhausted)

// Hub copies the output of one container to its attached clients. It is safe for concurrent
// use.
type Hub struct {
	// mu guards clients.
	mu      sync.Mutex
	clients map[*client]struct{}
}

type client struct {
	wants  map[Kind]bool
	queue  chan piece
	left   chan struct{} // closed when the client is gone
	kicked chan struct{} // closed when it was too slow
	since  time.Time

	// mu guards held.
	mu   sync.Mutex
	held time.Duration // for which it has held up the container
}

type piece struct {
	kind Kind
	data []byte
}

// join adds a client.
func (h *Hub) join(ask Ask) *client {
	c := &client{
		wants:  map[Kind]bool{Output: ask.Stdout, Errors: ask.Stderr},
		queue:  make(chan piece, queueLength),
		left:   make(chan struct{}),
		kicked: make(chan struct{}),
		since:  time.Now(),
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.clients == nil {
		h.clients = map[*client]struct{}{}
	}
	h.clients[c] = struct{}{}
	return c
}

// leave removes a client.
func (h *Hub) leave(c *client) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.clients, c)
	close(c.left)
}

// Publish queues a chunk for the clients that want the stream.
func (h *Hub) Publish(kind Kind, chunk []byte) {
	h.mu.Lock()
	if len(h.clients) == 0 {
		h.mu.Unlock()
		return
	}
	var to []*client
	for c := range h.clients {
		if c.wants[kind] {
			to = append(to, c)
		}
	}
	h.mu.Unlock()
	if len(to) == 0 {
		return
	}
	p := piece{kind: kind, data: append([]byte(nil), chunk...)}
	for _, c := range to {
		select {
		case c.queue <- p:
		default:
			h.push(c, p)
		}
	}
}

// push waits for room in a client's queue as long as the client may hold up the container.
func (h *Hub) push(c *client, p piece) {
	began := time.Now()
	c.mu.Lock()
	left := patience + began.Sub(c.since)/patienceGrowth - c.held
	c.mu.Unlock()
	t := time.NewTimer(max(left, 0))
	defer t.Stop()
	select {
	case c.queue <- p:
	case <-c.left:
	case <-c.kicked:
	case <-t.C:
		h.kick(c)
	}
	c.mu.Lock()
	c.held += time.Since(began)
	c.mu.Unlock()
}

func (h *Hub) kick(c *client) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.clients[c]; !ok {
		return
	}
	// Out of the set, so that neither stream queues for it or kicks it again.
	delete(h.clients, c)
	close(c.kicked)
}
