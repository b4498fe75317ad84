// Package layerusage remembers what the writable layers of containers take, because finding
// out costs a walk over all their files.
//
// A figure that is asked for is at most as old as the cache's life plus the time of the
// walk: an old one is given again while the new one is being found out. Only a layer that
// was never measured is waited for, and not for long. Layers that nobody asks about cost
// nothing. All methods may be called concurrently.
package layerusage

import (
	"context"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// parallel is how many layers are walked over at a time.
	parallel = 2
	// FirstWait is how long the first figure of a layer is waited for. Who asks for many in
	// turn gives all of them a context that ends after it.
	FirstWait = 2 * time.Second
	// forgotten is how long a figure is kept that nobody asks for.
	forgotten = 10 * time.Minute
)

// Source measures layers.
type Source interface {
	// Usage walks over a layer. Errors: ErrNotFound.
	Usage(ctx context.Context, key, snapshotter string) (bytes, inodes uint64, err error)
}

// Usage is what a layer takes, as of At; the zero value is that of a layer not measured yet.
type Usage struct {
	Bytes, Inodes uint64
	At            time.Time
}

// Cache remembers usage. Close it.
type Cache struct {
	source Source
	life   time.Duration
	slots  chan struct{}
	end    context.Context //nolint:containedctx // walks last as long as the cache
	stop   context.CancelFunc
	walks  sync.WaitGroup

	// mu guards the rest.
	mu      sync.Mutex
	closed  bool
	entries map[string]*entry
	pruned  time.Time
}

type entry struct {
	usage Usage
	asked time.Time
	// walking is closed at the end of the walk under way; nil if there is none.
	walking chan struct{}
}

// New returns an empty cache; figures are taken for current as long as life. Its walks end
// with ctx too.
func New(ctx context.Context, source Source, life time.Duration) *Cache {
	end, stop := context.WithCancel(ctx)
	return &Cache{
		source: source, life: life, slots: make(chan struct{}, parallel), end: end, stop: stop,
		entries: make(map[string]*entry),
	}
}

// Close ends all walks and waits for them.
func (c *Cache) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.stop()
	c.walks.Wait()
}

// Usage returns what a layer takes. One that does not exist takes nothing.
func (c *Cache) Usage(ctx context.Context, key, snapshotter string) Usage {
	e, walking := c.ask(key, snapshotter)
	if walking != nil {
		timer := time.NewTimer(FirstWait)
		defer timer.Stop()
		select {
		case <-walking:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.usage
}

// ask returns the entry of a layer and starts a walk if its figure is old. The channel is
// not nil if there is no figure yet.
func (c *Cache) ask(key, snapshotter string) (*entry, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.prune(now)
	e := c.entries[key]
	if e == nil {
		e = &entry{}
		c.entries[key] = e
	}
	e.asked = now
	if e.walking == nil && now.Sub(e.usage.At) >= c.life && !c.closed {
		walking := make(chan struct{})
		e.walking = walking
		c.walks.Go(func() { c.walk(e, key, snapshotter, walking) })
	}
	if e.usage.At.IsZero() {
		return e, e.walking
	}
	return e, nil
}

func (c *Cache) walk(e *entry, key, snapshotter string, walking chan struct{}) {
	defer close(walking)
	var bytes, inodes uint64
	var err error
	select {
	case c.slots <- struct{}{}:
		bytes, inodes, err = c.source.Usage(c.end, key, snapshotter)
		<-c.slots
	case <-c.end.Done():
		err = c.end.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e.walking = nil
	switch {
	case err == nil:
		e.usage = Usage{Bytes: bytes, Inodes: inodes, At: time.Now()}
	case errdefs.IsNotFound(err):
		e.usage = Usage{At: time.Now()}
	default:
		// The last figure stays; the next question tries again.
	}
}

// prune forgets what nobody asks for. The caller holds mu.
func (c *Cache) prune(now time.Time) {
	if now.Sub(c.pruned) < forgotten {
		return
	}
	c.pruned = now
	for key, e := range c.entries {
		if e.walking == nil && now.Sub(e.asked) >= forgotten {
			delete(c.entries, key)
		}
	}
}
