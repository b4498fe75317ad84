package containerevents

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
)

// watchInterval is how often the connection to the bus is looked at while somebody follows.
const watchInterval = time.Second

// Observer is told how followers fare. Its methods are called concurrently.
type Observer interface {
	// Following is called with the number of followers when it changes.
	Following(n int)
	// Cut is called for each follower that was cut off.
	Cut()
}

// Parts are what a Feed works with; all are required.
type Parts struct {
	Sandboxes  sandboxv1.SandboxServiceClient
	Containers containerv1.ContainerServiceClient
	// Source reads changes from the bus into the sink until its context ends.
	Source func(ctx context.Context, sink Sink) error
	// Connected tells whether there is a connection to the bus.
	Connected func() bool
	Observer  Observer
	Log       *slog.Logger
}

// Feed hands events to followers while it runs. It may be used concurrently.
type Feed struct {
	p Parts
	// sending are the goroutines that send to followers.
	sending sync.WaitGroup

	// turn is a mutex that can be waited for with a context; its holder may ask sandboxd.
	turn chan struct{}
	// index is guarded by turn; nil while nobody follows.
	index *index

	// mu guards the rest.
	mu        sync.Mutex
	running   bool
	followers map[*Follower]struct{}
}

// New returns a feed. Nobody can follow before it runs.
func New(p Parts) *Feed {
	return &Feed{p: p, turn: make(chan struct{}, 1), followers: make(map[*Follower]struct{})}
}

// Run reads events until ctx ends; then all followers are cut off.
func (f *Feed) Run(ctx context.Context) error {
	f.setRunning(true)
	defer f.sending.Wait()
	defer f.cutAll(errEnded())
	defer f.setRunning(false)
	ctx, cancel := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { f.watch(ctx) })
	defer watch.Wait()
	defer cancel()
	return f.p.Source(ctx, f)
}

func (f *Feed) setRunning(running bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running = running
}

// enter lets a goroutine send to a follower; it must then leave by sending.Done.
func (f *Feed) enter() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running {
		f.sending.Add(1)
	}
	return f.running
}

// watch cuts the followers off when the bus is away: they would take silence for rest.
func (f *Feed) watch(ctx context.Context) {
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if f.following() && !f.p.Connected() {
				f.p.Log.WarnContext(ctx, "followers of container events cut off, the bus is away")
				f.cutAll(errAway())
			}
		case <-ctx.Done():
			return
		}
	}
}

func errAway() error { return fmt.Errorf("the bus is away: %w", errdefs.ErrUnavailable) }

func errEnded() error { return fmt.Errorf("the event feed does not run: %w", errdefs.ErrUnavailable) }

// Follow returns a follower that gets all events from now on. Close it. Errors:
// Unavailable while the bus or sandboxd is away.
func (f *Feed) Follow(ctx context.Context) (*Follower, error) {
	done, err := f.take(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	if !f.p.Connected() {
		return nil, errAway()
	}
	if !f.following() {
		f.index = nil // what happened meanwhile was not noted
	}
	if f.index == nil {
		if f.index, err = f.list(ctx); err != nil {
			return nil, err
		}
	}
	follower := newFollower(f)
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.running {
		return nil, errEnded()
	}
	f.followers[follower] = struct{}{}
	f.p.Observer.Following(len(f.followers))
	return follower, nil
}

func (f *Feed) list(ctx context.Context) (*index, error) {
	sandboxes, err := f.p.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	containers, err := f.p.Containers.ListContainers(ctx, &containerv1.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	return newIndex(sandboxes.GetItems(), containers.GetContainers()), nil
}

// take takes the turn.
func (f *Feed) take(ctx context.Context) (done func(), err error) {
	select {
	case f.turn <- struct{}{}:
		return func() { <-f.turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (f *Feed) following() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.followers) > 0
}

func (f *Feed) leave(follower *Follower) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.followers[follower]; !ok {
		return
	}
	delete(f.followers, follower)
	f.p.Observer.Following(len(f.followers))
}

// deliver queues an event for every follower; it never waits.
func (f *Feed) deliver(event *criv1.ContainerEventResponse) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for follower := range f.followers {
		if !follower.offer(event) {
			delete(f.followers, follower)
			f.p.Observer.Cut()
			f.p.Observer.Following(len(f.followers))
		}
	}
}

// cutAll ends all following.
func (f *Feed) cutAll(cause error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for follower := range f.followers {
		follower.cut(cause)
		f.p.Observer.Cut()
	}
	clear(f.followers)
	f.p.Observer.Following(0)
}
