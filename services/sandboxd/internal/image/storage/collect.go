package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

const (
	// collectDelay gathers removals that come together into one collection.
	collectDelay = 500 * time.Millisecond
	// collectInterval is how often leftovers that could not be removed are tried again.
	collectInterval = 5 * time.Minute
	// stopPatience is how long a stop waits for a collection under way. The folders of
	// thousands of containers take longer; those that are left are found by the next one.
	stopPatience = 3 * time.Second
	// reserveSize is kept on disk so that the databases can write their removals when
	// nothing else fits any more.
	reserveSize = 1 << 20
)

// Collect removes everything that nothing refers to and returns when the space is free. A
// collection that cannot remove one thing still removes the others.
func (s *Storage) Collect(ctx context.Context) error {
	return s.collect.now(ctx)
}

// CollectSoon asks for a collection in the background.
func (s *Storage) CollectSoon() { s.collect.soon() }

func (s *Storage) collectNow(ctx context.Context) error {
	ctx = s.Context(ctx)
	_, err := s.db.GarbageCollect(ctx)
	if errors.Is(err, syscall.ENOSPC) {
		// The databases are copy-on-write: a removal needs a little space first.
		if rmErr := os.Remove(s.reservePath()); rmErr == nil {
			_, err = s.db.GarbageCollect(ctx)
		}
	}
	errs := []error{err}
	for name, sn := range s.backends {
		cleaner, ok := sn.(snapshots.Cleaner)
		if !ok || s.Proxied(name) { // a process of its own cleans up when something was removed
			continue
		}
		if err := cleaner.Cleanup(ctx); err != nil && !errdefs.IsNotImplemented(err) {
			errs = append(errs, fmt.Errorf("clean-up of snapshotter %s: %w", name, err))
		}
	}
	s.makeReserve(ctx)
	return errors.Join(errs...)
}

func (s *Storage) reservePath() string { return filepath.Join(s.root, "reserve") }

// makeReserve takes the reserve back. That fails on a full disk and is tried again at the
// next collection.
func (s *Storage) makeReserve(ctx context.Context) {
	if fi, err := os.Stat(s.reservePath()); err == nil && fi.Size() >= reserveSize {
		return
	}
	f, err := os.OpenFile(s.reservePath(), os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		err = unix.Fallocate(int(f.Fd()), 0, 0, reserveSize)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		s.log.DebugContext(ctx, "no space reserved for removals", slog.Any("error", err))
	}
}

// sweep removes what an earlier life of the process has not finished, except for blobs that
// the next attempt may go on with. Snapshots of an interrupted pull were never synced: they
// must not be found by the next pull, so they go first and at once.
func (s *Storage) sweep(ctx context.Context) error {
	if err := s.sweepLeases(ctx); err != nil {
		return err
	}
	if err := s.touch(ctx); err != nil {
		return err
	}
	return s.collectNow(ctx)
}

// touch makes one removable thing in each backend. The collector looks for leftovers only
// where something was removed, and a crash may have come between the two. Snapshotters in other
// processes may be away; what is left there goes when something is removed.
func (s *Storage) touch(ctx context.Context) error {
	const key = "sweep"
	for name := range s.backends {
		if s.Proxied(name) {
			continue
		}
		sn := s.db.Snapshotter(name)
		if _, err := sn.Prepare(ctx, key, ""); err != nil && !errdefs.IsAlreadyExists(err) {
			return fmt.Errorf("snapshotter %s: %w", name, err)
		}
	}
	data := []byte(key)
	desc := ocispec.Descriptor{Digest: digest.FromBytes(data), Size: int64(len(data))}
	if err := content.WriteBlob(ctx, s.Content(), key, bytes.NewReader(data), desc); err != nil {
		return fmt.Errorf("content store: %w", err)
	}
	return nil
}

// collector runs collections one at a time, on demand and now and then.
type collector struct {
	run  func(context.Context) error
	log  *slog.Logger
	stop func()
	wake chan struct{} // something waits
	hint chan struct{} // something was removed

	mu      sync.Mutex
	waiters []chan error // mu guards waiters and closed
	closed  bool
}

func startCollector(ctx context.Context, run func(context.Context) error, log *slog.Logger) *collector {
	ctx, cancel := context.WithCancel(ctx)
	c := &collector{
		run: run, log: log,
		wake: make(chan struct{}, 1),
		hint: make(chan struct{}, 1),
	}
	done := make(chan struct{})
	c.stop = func() {
		cancel()
		timer := time.NewTimer(stopPatience)
		defer timer.Stop()
		select {
		case <-done:
		case <-timer.C:
			log.InfoContext(ctx, "collection of unused image data is left to the next start")
		}
	}
	go func() {
		defer close(done)
		c.loop(ctx)
	}()
	return c
}

func (c *collector) soon() {
	select {
	case c.hint <- struct{}{}:
	default:
	}
}

func (c *collector) now(ctx context.Context) error {
	done := make(chan error, 1)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return fmt.Errorf("image storage is closed: %w", errdefs.ErrUnavailable)
	}
	c.waiters = append(c.waiters, done)
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *collector) loop(ctx context.Context) {
	timer := time.NewTimer(collectInterval)
	defer timer.Stop()
	for pending := false; ; {
		select {
		case <-ctx.Done():
			c.finish(true, fmt.Errorf("image storage is closed: %w", errdefs.ErrUnavailable))
			return
		case <-c.hint:
			if !pending {
				pending = true
				timer.Reset(collectDelay)
			}
			continue
		case <-c.wake:
		case <-timer.C:
		}
		pending = false
		waiting := c.take()
		err := c.run(ctx)
		if err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "collection of unused image data incomplete", slog.Any("error", err))
		}
		for _, w := range waiting {
			w <- err
		}
		timer.Reset(collectInterval)
	}
}

// take returns who waits for the collection that is about to start. Who comes later waits
// for the next one, since its removals may come too late for this one.
func (c *collector) take() []chan error {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := c.waiters
	c.waiters = nil
	return waiting
}

func (c *collector) finish(closed bool, err error) {
	c.mu.Lock()
	c.closed = closed
	c.mu.Unlock()
	for _, w := range c.take() {
		w <- err
	}
}
