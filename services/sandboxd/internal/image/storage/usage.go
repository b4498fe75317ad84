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

const (
	// usageLife is how long figures of writable layers are taken for current.
	usageLife = 10 * time.Second
	// usageMost is the greatest age at which figures are given out while newer ones are made.
	usageMost = time.Minute
)

// Usage is what a snapshotter's file system holds. Bytes and inodes of images and of
// writable layers are apart.
type Usage struct {
	// Snapshotter names the snapshotter.
	Snapshotter string
	// Images is what image layers take; that of the default snapshotter includes the blobs.
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
	active    map[string]map[string]snapshots.Usage // snapshotter, key
	at        time.Time
	running   chan struct{} // closed at the end of the measurement under way; nil for none
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
	out := make([]Usage, 0, len(s.backends))
	for name := range s.backends {
		layers, err := s.committedUsage(ctx, name)
		if err != nil {
			return nil, err
		}
		if name == s.standard {
			layers.Add(blobs)
		}
		s.usage.mu.Lock()
		var containers snapshots.Usage
		for _, u := range s.usage.active[name] {
			containers.Add(u)
		}
		out = append(out, Usage{Snapshotter: name, Images: layers, Containers: containers, At: s.usage.at})
		s.usage.mu.Unlock()
	}
	return out, nil
}

// ActiveUsage returns the use of one writable layer. The figures are up to a minute old; they
// are made anew in the background, at most every ten seconds and only while someone asks.
// Errors: ErrNotFound.
func (s *Storage) ActiveUsage(ctx context.Context, snapshotter, key string) (snapshots.Usage, error) {
	ctx = s.Context(ctx)
	sn, name, err := s.Snapshotter(snapshotter)
	if err != nil {
		return snapshots.Usage{}, err
	}
	s.refreshActive(ctx)
	s.usage.mu.Lock()
	u, ok := s.usage.active[name][key]
	s.usage.mu.Unlock()
	if ok {
		return u, nil
	}
	u, err = sn.Usage(ctx, key) // newer than the figures
	if err != nil {
		return snapshots.Usage{}, err
	}
	s.usage.mu.Lock()
	defer s.usage.mu.Unlock()
	if s.usage.active[name] != nil {
		s.usage.active[name][key] = u
	}
	return u, nil
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
// first figures, and those that replace very old ones, are waited for.
func (s *Storage) refreshActive(ctx context.Context) {
	s.usage.mu.Lock()
	age := time.Since(s.usage.at)
	if age < usageLife {
		s.usage.mu.Unlock()
		return
	}
	done := s.usage.running
	if done == nil {
		done = make(chan struct{})
		s.usage.running = done
		s.usage.refresh.Go(func() {
			defer close(done)
			s.measureActive(context.WithoutCancel(ctx))
		})
	}
	s.usage.mu.Unlock()
	if age > usageMost {
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
}

func (s *Storage) measureActive(ctx context.Context) {
	active := make(map[string]map[string]snapshots.Usage)
	for name := range s.backends {
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
			continue
		}
		figures := make(map[string]snapshots.Usage, len(keys))
		for _, key := range keys {
			select {
			case <-s.closing:
				return
			default:
			}
			if u, err := sn.Usage(ctx, key); err == nil {
				figures[key] = u
			}
		}
		active[name] = figures
	}
	s.usage.mu.Lock()
	defer s.usage.mu.Unlock()
	s.usage.active, s.usage.at, s.usage.running = active, time.Now(), nil
}
