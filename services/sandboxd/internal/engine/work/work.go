// Package work runs what outlives a call: followers of processes, repetitions, undoing.
//
// Somebody waits for all of it: Close ends the background work of a Group and returns when
// the last of it is done.
package work

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/pause"
)

const (
	// undoTime bounds the undoing of one operation.
	undoTime = 2 * time.Minute

	retryFirst = 500 * time.Millisecond
	retryMost  = time.Minute
)

var errStops = fmt.Errorf("sandboxd stops: %w", errdefs.ErrUnavailable)

// Group is background work with a common end. Its methods are safe for concurrent use.
type Group struct {
	log  *slog.Logger
	life context.Context //nolint:containedctx // background work lives as long as the group
	end  context.CancelCauseFunc
	work sync.WaitGroup

	// closing guards the entry into work: nothing is added once Close has begun.
	closing sync.RWMutex
	closed  bool
}

// New returns a group that lives until it is closed; of ctx it has the values.
func New(ctx context.Context, log *slog.Logger) *Group {
	life, end := context.WithCancelCause(context.WithoutCancel(ctx))
	return &Group{log: log, life: life, end: end}
}

// Go runs fn until it is done or the group is closed; a closed group does not begin with it.
func (g *Group) Go(fn func(ctx context.Context)) (begun bool) {
	g.closing.RLock()
	defer g.closing.RUnlock()
	if g.closed {
		return false
	}
	g.work.Go(func() { fn(g.life) })
	return true
}

// Job is one piece of background work that somebody asks about later. Its methods are safe for
// concurrent use; a nil Job is done.
type Job struct {
	cancel context.CancelCauseFunc
	over   chan struct{}
	err    error // set before over is closed
}

// Start runs fn beside its caller, with the values of ctx, until it is done, cancelled, the
// group is closed or limit has passed. In a closed group the job fails with ErrUnavailable.
func (g *Group) Start(ctx context.Context, limit time.Duration, fn func(ctx context.Context) error) *Job {
	own, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	j := &Job{cancel: cancel, over: make(chan struct{}), err: errStops}
	begun := g.Go(func(life context.Context) {
		defer close(j.over)
		defer context.AfterFunc(life, func() { cancel(context.Cause(life)) })()
		limited, done := context.WithTimeout(own, limit)
		defer done()
		j.err = fn(limited)
	})
	if !begun {
		cancel(errStops)
		close(j.over)
	}
	return j
}

// Wait waits for the job and returns its error, or the cause of ctx when that ends first.
func (j *Job) Wait(ctx context.Context) error {
	if j == nil {
		return nil
	}
	select {
	case <-j.over:
		return j.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Cancel ends the job and waits until it is over, whatever its outcome. It fails with the cause of
// ctx when that ends first.
func (j *Job) Cancel(ctx context.Context) error {
	if j == nil {
		return nil
	}
	j.cancel(context.Canceled)
	select {
	case <-j.over:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Closing is closed when the group's end begins.
func (g *Group) Closing() <-chan struct{} { return g.life.Done() }

// Close ends the background work and waits for it.
func (g *Group) Close() {
	g.closing.Lock()
	g.closed = true
	g.closing.Unlock()
	g.end(errStops)
	g.work.Wait()
}

// Insist repeats fn with growing pauses until it succeeds; false means that ctx ended. Each
// failure is logged with the step and the object that it belongs to.
func (g *Group) Insist(ctx context.Context, step string, object slog.Attr, fn func(ctx context.Context) error) bool {
	for delay := retryFirst; ; delay = min(2*delay, retryMost) {
		err := fn(ctx)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		g.log.WarnContext(ctx, "a step failed and is repeated", slog.String("step", step), object, slog.Any("error", err))
		if !pause.For(ctx, delay) {
			return false
		}
	}
}

// Undo runs fn under a context that outlives ctx, for clean-up after a failure.
func Undo(ctx context.Context, fn func(ctx context.Context)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	fn(ctx)
}
