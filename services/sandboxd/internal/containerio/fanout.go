package containerio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crilog"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// clientQueue is how many chunks wait for an attached client.
	clientQueue = 32
	// clientGrace is how long a client whose queue is full may hold up the container's output.
	clientGrace = 5 * time.Second
)

// errTooSlow is why a client was disconnected that held up the container.
var errTooSlow = fmt.Errorf("attached client reads too slowly: %w", errdefs.ErrResourceExhausted)

// fanout copies the output of a container to its attached clients.
type fanout struct {
	// mu guards clients.
	mu      sync.Mutex
	clients map[*client]struct{}
}

// client is one attached client.
type client struct {
	writers map[string]io.Writer
	queue   chan piece
	left    chan struct{} // closed when the client is gone
	kicked  chan struct{} // closed when it was too slow
}

type piece struct {
	stream string
	data   []byte
}

func newFanout() *fanout { return &fanout{clients: map[*client]struct{}{}} }

// join adds a client.
func (f *fanout) join(s pod.Streams) *client {
	c := &client{
		writers: map[string]io.Writer{},
		queue:   make(chan piece, clientQueue),
		left:    make(chan struct{}),
		kicked:  make(chan struct{}),
	}
	if s.Stdout != nil {
		c.writers[crilog.Stdout] = s.Stdout
	}
	if s.Stderr != nil {
		c.writers[crilog.Stderr] = s.Stderr
	}
	f.mu.Lock()
	f.clients[c] = struct{}{}
	f.mu.Unlock()
	return c
}

// leave removes a client.
func (f *fanout) leave(c *client) {
	f.mu.Lock()
	delete(f.clients, c)
	f.mu.Unlock()
	close(c.left)
}

// publish queues a chunk for every client of a stream. A client with a full queue is waited
// for a while, and is then disconnected.
func (f *fanout) publish(stream string, chunk []byte) {
	f.mu.Lock()
	var to []*client
	for c := range f.clients {
		if c.writers[stream] != nil {
			to = append(to, c)
		}
	}
	f.mu.Unlock()
	if len(to) == 0 {
		return
	}
	p := piece{stream: stream, data: append([]byte(nil), chunk...)}
	for _, c := range to {
		select {
		case c.queue <- p:
		default:
			f.push(c, p)
		}
	}
}

// push waits for room in a client's queue.
func (f *fanout) push(c *client, p piece) {
	t := time.NewTimer(clientGrace)
	defer t.Stop()
	select {
	case c.queue <- p:
	case <-c.left:
	case <-c.kicked:
	case <-t.C:
		f.kick(c)
	}
}

func (f *fanout) kick(c *client) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.clients[c]; !ok {
		return
	}
	// Out of the set, so that neither stream queues for it or kicks it again.
	delete(f.clients, c)
	close(c.kicked)
}

// serve writes a client's pieces until the output has ended, ctx ends or the client fails.
func (c *client) serve(ctx context.Context, ended <-chan struct{}) error {
	for {
		select {
		case p := <-c.queue:
			if err := c.write(p); err != nil {
				return err
			}
		case <-c.kicked:
			return errTooSlow
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ended:
			return c.rest()
		}
	}
}

// rest writes what is queued when the output has ended.
func (c *client) rest() error {
	for {
		select {
		case p := <-c.queue:
			if err := c.write(p); err != nil {
				return err
			}
		default:
			select {
			case <-c.kicked:
				return errTooSlow
			default:
				return nil
			}
		}
	}
}

func (c *client) write(p piece) error {
	_, err := c.writers[p.stream].Write(p.data)
	if err == nil || errors.Is(err, io.ErrClosedPipe) {
		return err
	}
	return fmt.Errorf("attached client: %w", err)
}
