package image

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
)

// errAbandoned is the cause of a pull's end when nobody waits for it any more.
var errAbandoned = fmt.Errorf("nobody waits for the pull: %w", context.Canceled)

// flights joins identical pulls. Work goes on as long as someone waits for it.
type flights struct {
	work sync.WaitGroup

	mu      sync.Mutex // mu guards the rest
	running map[string]*flight
	closed  bool
}

type flight struct {
	done    chan struct{}
	cancel  context.CancelCauseFunc
	waiting int
	id      string
	err     error
}

// do runs fn, or joins the run with the same key. When ctx ends, do returns at once; fn is
// cancelled if nobody else waits for it.
func (f *flights) do(ctx context.Context, key string, fn func(context.Context) (string, error)) (string, error) {
	if err := ctx.Err(); err != nil {
		return "", context.Cause(ctx)
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return "", fmt.Errorf("image service is closed: %w", errdefs.ErrUnavailable)
	}
	fl := f.running[key]
	if fl == nil {
		fl = f.startLocked(ctx, key, fn)
	}
	fl.waiting++
	f.mu.Unlock()
	select {
	case <-fl.done:
		return fl.id, fl.err
	case <-ctx.Done():
		f.leave(key, fl)
		return "", context.Cause(ctx)
	}
}

func (f *flights) startLocked(ctx context.Context, key string, fn func(context.Context) (string, error)) *flight {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	fl := &flight{done: make(chan struct{}), cancel: cancel}
	if f.running == nil {
		f.running = make(map[string]*flight)
	}
	f.running[key] = fl
	f.work.Go(func() {
		defer cancel(nil)
		fl.id, fl.err = fn(ctx)
		f.mu.Lock()
		if f.running[key] == fl {
			delete(f.running, key)
		}
		f.mu.Unlock()
		close(fl.done)
	})
	return fl
}

// leave gives up one wait. An abandoned run can no longer be joined.
func (f *flights) leave(key string, fl *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl.waiting--; fl.waiting > 0 {
		return
	}
	if f.running[key] == fl {
		delete(f.running, key)
	}
	fl.cancel(errAbandoned)
}

// close cancels all runs and waits until they have cleaned up.
func (f *flights) close() {
	f.mu.Lock()
	f.closed = true
	for _, fl := range f.running {
		fl.cancel(errors.Join(errAbandoned, errdefs.ErrUnavailable))
	}
	f.mu.Unlock()
	f.work.Wait()
}
