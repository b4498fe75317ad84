package storage

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
)

// usageLife is how long figures of writable layers are taken for current.
const usageLife = 10 * time.Second

// Usage is what a snapshotter's file system holds. Bytes and inodes of images and of
// writable layers are apart.
type Usage struct {
	// Snapshotter names the snapshotter.
	Snapshotter string
	// Images is what image layers take; that of the default snapshotter includes the
	// blobs, also those that are being fetched.
	Images snapshots.Usage
	// Containers is what writable layers take, as of At.
	Containers snapshots.Usage
	// At is when the writable layers were measured.
	At time.Time
}

// usageCache keeps figures that are dear to get: sizes of committed layers, which never
// change, and of writable ones, which take a walk over their files.
type usageCache struct {
	refresh sync.WaitGroup

	mu        sync.Mutex                            // mu guards the rest
	committed map[string]map[string]snapshots.Usage // snapshotter, name
	proxied   map[string]snapshots.Usage            // committed layers of those in other processes
	active    map[string]snapshots.Usage            // snapshotter
	at        time.Time
	busy      bool
}

func (u *usageCache) wait() { u.refresh.Wait() }

// Usage returns the use of each snapshotter. It reads databases only: the writable layers
// are measured in the background, at most every ten seconds and only while someone asks.
func (s *Storage) Usage(ctx context.Context) ([]Usage, error) {
	ctx = s.Context(ctx)
	s.refreshActive(ctx)
	var blobs snapshots.Usage
	err := s.Content().Walk(ctx, func(info content.Info) error {
		blobs.Add(snapshots.Usage{Inodes: 1, Size: info.Size})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("content store: %w", err)
	}
	begun, err := s.Content().ListStatuses(ctx)
	if err != nil {
		return nil, fmt.Errorf("content store: %w", err)
	}
	for _, st := range begun {
		blobs.Add(snapshots.Usage{Inodes: 1, Size: st.Offset})
	}
	out := make([]Usage, 0, len(s.backends))
	for name := range s.backends {
		layers, err := s.layersUsage(ctx, name)
		if err != nil {
			return nil, err
		}
		if name == s.standard {
			layers.Add(blobs)
		}
		s.usage.mu.Lock()
		out = append(out, Usage{Snapshotter: name, Images: layers, Containers: s.usage.active[name], At: s.usage.at})
		s.usage.mu.Unlock()
	}
	return out, nil
}

// layersUsage returns what the committed layers of a snapshotter take. Another process is not
// waited for: the last known figures are returned.
func (s *Storage) layersUsage(ctx context.Context, name string) (snapshots.Usage, error) {
	if !s.Proxied(name) {
		return s.committedUsage(ctx, name)
	}
	s.usage.mu.Lock()
	defer s.usage.mu.Unlock()
	return s.usage.proxied[name], nil
}

// committedUsage sums up the committed layers of a snapshotter.
func (s *Storage) committedUsage(ctx context.Context, name string) (sum snapshots.Usage, err error) {
	sn := s.db.Snapshotter(name)
	var names []string
	err = sn.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Kind == snapshots.KindCommitted {
			names = append(names, info.Name)
		}
		return nil
	})
	if err != nil {
		return sum, fmt.Errorf("snapshotter %s: %w", name, err)
	}
	known := make(map[string]snapshots.Usage, len(names))
	for _, n := range names {
		s.usage.mu.Lock()
		u, ok := s.usage.committed[name][n]
		s.usage.mu.Unlock()
		if !ok {
			if u, err = sn.Usage(ctx, n); err != nil {
				continue // removed in the meantime
			}
		}
		known[n] = u
		sum.Add(u)
	}
	s.usage.mu.Lock()
	defer s.usage.mu.Unlock()
	if s.usage.committed == nil {
		s.usage.committed = make(map[string]map[string]snapshots.Usage)
	}
	s.usage.committed[name] = known
	return sum, nil
}

// refreshActive measures the writable layers in the background if the figures are old. The
// first figures are waited for.
func (s *Storage) refreshActive(ctx context.Context) {
	s.usage.mu.Lock()
	first := s.usage.at.IsZero()
	if s.usage.busy || time.Since(s.usage.at) < usageLife {
		s.usage.mu.Unlock()
		return
	}
	s.usage.busy = true
	s.usage.mu.Unlock()
	done := make(chan struct{})
	s.usage.refresh.Go(func() { s.measure(context.WithoutCancel(ctx), func() { close(done) }) })
	if first {
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
}

// measure measures the writable layers, and all layers of snapshotters in other processes, which
// come last. It calls done before them.
func (s *Storage) measure(ctx context.Context, done func()) {
	var away []string
	for name := range s.backends {
		if s.Proxied(name) {
			away = append(away, name)
			continue
		}
		s.measureActive(ctx, name)
	}
	s.usage.mu.Lock()
	s.usage.at = time.Now()
	s.usage.mu.Unlock()
	done()
	for _, name := range away {
		s.measureActive(ctx, name)
		layers, err := s.committedUsage(ctx, name)
		if err != nil {
			s.log.WarnContext(ctx, "layers not measured", slog.Any("error", err))
			continue
		}
		s.usage.mu.Lock()
		if s.usage.proxied == nil {
			s.usage.proxied = make(map[string]snapshots.Usage)
		}
		s.usage.proxied[name] = layers
		s.usage.mu.Unlock()
	}
	s.usage.mu.Lock()
	defer s.usage.mu.Unlock()
	s.usage.busy = false
}

func (s *Storage) measureActive(ctx context.Context, name string) {
	sn := s.db.Snapshotter(name)
	var keys []string
	err := sn.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Kind == snapshots.KindActive {
			keys = append(keys, info.Name)
		}
		return nil
	})
	if err != nil {
		s.log.WarnContext(ctx, "writable layers not measured", slog.Any("error", err))
		return
	}
	var sum snapshots.Usage
	for _, key := range keys {
		select {
		case <-s.closing:
			return
		default:
		}
		if u, err := sn.Usage(ctx, key); err == nil {
			sum.Add(u)
		}
	}
	s.usage.mu.Lock()
	defer s.usage.mu.Unlock()
	if s.usage.active == nil {
		s.usage.active = make(map[string]snapshots.Usage)
	}
	s.usage.active[name] = sum
}
