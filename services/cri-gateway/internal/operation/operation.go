// Package operation keeps the operations in flight.
//
// An operation outlives the call that began it: the work runs on a context of its own
// with its own time limit, and a caller waits for it no longer than its own context
// allows. A later call with the same key joins the work and gets its result. Calls
// without a key are never joined, but run detached and are waited for at shutdown all
// the same.
//
// Nothing here is durable. A result is kept only while a caller may still pick it up,
// that is until the work ends; what a later retry finds is the business of the work.
package operation

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// Observer is told what happens to operations. Its methods are called concurrently.
type Observer interface {
	// Begin is called when work of the kind starts; the function it returns is called
	// when the work ends.
	Begin(kind string) (end func(err error))
	// Join is called when a call joins work in flight.
	Join(kind string)
}

// Group is a set of operations in flight. Its methods may be called concurrently.
type Group struct {
	log      *slog.Logger
	observer Observer

	// mu guards everything below.
	mu       sync.Mutex
	closed   bool
	inflight map[Key]*flight
	running  map[*flight]struct{}
	// idle is made by Close and closed when the last operation has ended.
	idle chan struct{}
}

// Key names an operation among those of its kind. An empty Name is joined by nobody.
type Key struct {
	// Kind is the sort of work, such as "run_pod_sandbox"; a closed set, used in metrics.
	Kind string
	// Name is what the work is about.
	Name string
}

// Spec says what an operation is and how long it may take.
type Spec struct {
	// Key is what a later call joins by.
	Key Key
	// Fingerprint stands for the request's content. A call whose key is in flight with
	// another fingerprint is refused.
	Fingerprint string
	// Limit ends the work's context; it must be positive.
	Limit time.Duration
}

type flight struct {
	fingerprint string
	cancel      context.CancelCauseFunc
	done        chan struct{}

	// value and err are written before done is closed and read after it.
	value any
	err   error
}

// New returns an empty group.
func New(log *slog.Logger, observer Observer) *Group {
	return &Group{
		log:      log,
		observer: observer,
		inflight: make(map[Key]*flight),
		running:  make(map[*flight]struct{}),
	}
}

type deadlineKey struct{}

// CallerDeadline tells the work of an operation when the caller that began it stops
// waiting. The work is not bound by it.
func CallerDeadline(ctx context.Context) (time.Time, bool) {
	deadline, ok := ctx.Value(deadlineKey{}).(time.Time)
	return deadline, ok
}

// Do runs work as the operation spec, or joins it if it is in flight, and waits for its
// result or the end of ctx. The work's context carries the values of ctx but not its
// deadline. Errors: those of the work; Aborted if the key is in flight with another
// fingerprint; Unavailable after Close; the cause of ctx's end.
func Do[T any](ctx context.Context, g *Group, spec Spec, work func(ctx context.Context) (T, error)) (T, error) {
	var zero T
	f, err := g.begin(ctx, spec, func(ctx context.Context) (any, error) { return work(ctx) })
	if err != nil {
		return zero, err
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		return zero, fmt.Errorf("waiting for %s: %w", spec.Key.Kind, context.Cause(ctx))
	}
	if f.err != nil {
		return zero, f.err
	}
	value, ok := f.value.(T)
	if !ok {
		return zero, fmt.Errorf("operation %s %q has a result of another type: %w",
			spec.Key.Kind, spec.Key.Name, errdefs.ErrInternal)
	}
	return value, nil
}

// begin joins the operation or starts it.
func (g *Group) begin(ctx context.Context, spec Spec, work func(context.Context) (any, error)) (*flight, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, fmt.Errorf("shutting down: %w", errdefs.ErrUnavailable)
	}
	if spec.Key.Name != "" {
		if f, ok := g.inflight[spec.Key]; ok {
			if f.fingerprint != spec.Fingerprint {
				return nil, fmt.Errorf("%s %q is in flight with another configuration: %w",
					spec.Key.Kind, spec.Key.Name, errdefs.ErrAborted)
			}
			g.observer.Join(spec.Key.Kind)
			return f, nil
		}
	}
	detached, cancelLimit := context.WithTimeoutCause(context.WithoutCancel(ctx), spec.Limit,
		fmt.Errorf("%s took longer than %s: %w", spec.Key.Kind, spec.Limit, context.DeadlineExceeded))
	if deadline, ok := ctx.Deadline(); ok {
		detached = context.WithValue(detached, deadlineKey{}, deadline)
	}
	workCtx, cancel := context.WithCancelCause(detached)
	f := &flight{fingerprint: spec.Fingerprint, cancel: cancel, done: make(chan struct{})}
	if spec.Key.Name != "" {
		g.inflight[spec.Key] = f
	}
	g.running[f] = struct{}{}
	go func() {
		defer cancelLimit()
		defer cancel(nil)
		g.run(workCtx, spec.Key, f, work)
	}()
	return f, nil
}

// run does the work and publishes its result. It is waited for by Close.
func (g *Group) run(ctx context.Context, key Key, f *flight, work func(context.Context) (any, error)) {
	end := g.observer.Begin(key.Kind)
	defer func() {
		if r := recover(); r != nil {
			g.log.ErrorContext(ctx, "operation panicked", slog.String("operation", key.Kind),
				slog.Any("panic", r), slog.String("stack", string(debug.Stack())))
			f.value, f.err = nil, fmt.Errorf("%s panicked: %w", key.Kind, errdefs.ErrInternal)
		}
		end(f.err)
		g.finish(key, f)
	}()
	f.value, f.err = work(ctx)
}

func (g *Group) finish(key Key, f *flight) {
	g.mu.Lock()
	defer g.mu.Unlock()
	// The key is free before the waiters wake up, so that a retry after a failure
	// starts anew and never sees the old failure.
	if g.inflight[key] == f {
		delete(g.inflight, key)
	}
	delete(g.running, f)
	close(f.done)
	if g.idle != nil && len(g.running) == 0 {
		close(g.idle)
		g.idle = nil
	}
}

// Close refuses new operations and waits for those in flight. When ctx ends first it
// cancels what still runs, waits up to grace for it to undo itself, and returns an error
// that says how many operations were cut short. It must be called once.
func (g *Group) Close(ctx context.Context, grace time.Duration) error {
	g.mu.Lock()
	g.closed = true
	if len(g.running) == 0 {
		g.mu.Unlock()
		return nil
	}
	idle := make(chan struct{})
	g.idle = idle
	g.mu.Unlock()

	select {
	case <-idle:
		return nil
	case <-ctx.Done():
	}
	cut := g.cancelAll()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-idle:
		return fmt.Errorf("%d operations cut short: %w", cut, context.Cause(ctx))
	case <-timer.C:
		return fmt.Errorf("%d operations abandoned: %w", cut, context.Cause(ctx))
	}
}

func (g *Group) cancelAll() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	for f := range g.running {
		f.cancel(fmt.Errorf("shutting down: %w", errdefs.ErrUnavailable))
	}
	return len(g.running)
}
