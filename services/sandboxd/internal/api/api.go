// Package api serves sandboxd's internal gRPC services. Its handlers check the form of a
// request, call the engine or the image service and translate the answer; they hold no
// state but the work in flight.
//
// Mutating work is detached from its caller: when the caller goes away the handler returns,
// and the work comes to its end all the same, within a time limit of its own.
package api

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// Limits of detached work.
const (
	prepareLimit = 4 * time.Minute
	changeLimit  = 5 * time.Minute
)

// Work is the detached work of all handlers. Wait for it at the end of the process.
type Work struct {
	log *slog.Logger
	wg  sync.WaitGroup
}

// NewWork returns an empty Work.
func NewWork(log *slog.Logger) *Work { return &Work{log: log} }

// Wait blocks until all detached work is done.
func (w *Work) Wait() { w.wg.Wait() }

type result[T any] struct {
	value T
	err   error
}

// detach runs fn under a context that outlives ctx, and waits for it as long as ctx lives.
// A panic becomes an error.
func detach[T any](ctx context.Context, w *Work, limit time.Duration, fn func(ctx context.Context) (T, error)) (T, error) {
	ch := make(chan result[T], 1)
	w.wg.Go(func() {
		work, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), limit,
			fmt.Errorf("not done after %v: %w", limit, context.DeadlineExceeded))
		defer cancel()
		var r result[T]
		defer func() {
			if p := recover(); p != nil {
				w.log.ErrorContext(ctx, "panic in a handler", slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
				r.err = fmt.Errorf("internal failure: %w", errdefs.ErrInternal)
			}
			ch <- r
		}()
		r.value, r.err = fn(work)
	})
	select {
	case r := <-ch:
		return r.value, r.err
	case <-ctx.Done():
		var zero T
		return zero, context.Cause(ctx)
	}
}

// detachErr is detach for a change without a value.
func detachErr(ctx context.Context, w *Work, fn func(ctx context.Context) error) error {
	_, err := detach(ctx, w, changeLimit, func(ctx context.Context) (struct{}, error) { return struct{}{}, fn(ctx) })
	return err
}

// required refuses an absent field.
func required(field string, present bool) error {
	if present {
		return nil
	}
	return fmt.Errorf("%s: must not be empty: %w", field, errdefs.ErrInvalidArgument)
}

// seconds is the time that a request gives in seconds. Requests may ask for more than a Duration
// holds; a century leaves room for sums.
func seconds(n int64) time.Duration {
	const most = 100 * 365 * 24 * 60 * 60
	return time.Duration(min(max(n, 0), most)) * time.Second
}
