// Package lifecycle starts the long-running parts of a process in order and stops
// them in reverse order.
//
// Each part has a context of its own, so that the store is still there while the
// last RPC drains: the contexts are cancelled one by one, last started first. A part
// that returns before it was told to ends the process, and a panic in a part is an
// error of that part. The service manager hears of readiness, of stopping, and (if
// it asks) of life through sd_notify. The package handles no signals: the caller's
// context ends the process.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// DefaultStopTimeout bounds the stop of a part that sets no limit of its own.
const DefaultStopTimeout = 10 * time.Second

// Part is one long-running piece of a process.
type Part struct {
	// Name appears in logs and errors.
	Name string
	// Run works until ctx is done and then cleans up and returns nil. It calls ready
	// once when the parts after it may start. Calling ready more than once is harmless.
	Run func(ctx context.Context, ready func()) error
	// StopTimeout bounds the time between the end of ctx and the return of Run;
	// zero means DefaultStopTimeout. A part that takes longer is left behind and reported.
	StopTimeout time.Duration
}

// Run starts the parts in order, each after its predecessor is ready, waits until ctx
// is done or a part ends, and stops what was started in reverse order. It returns the
// joined errors of all parts, nil after an orderly stop.
func Run(ctx context.Context, log *slog.Logger, parts ...Part) error {
	g := &group{log: log, ended: make(chan *started, len(parts))}
	failure := g.start(ctx, parts)
	if failure == nil && ctx.Err() == nil {
		g.notify(ctx, daemon.SdNotifyReady)
		stopWatchdog := g.watchdog(ctx)
		defer stopWatchdog()
		log.InfoContext(ctx, "started", slog.Int("parts", len(parts)))
		failure = g.wait(ctx)
	}
	g.notify(ctx, daemon.SdNotifyStopping)
	log.InfoContext(ctx, "stopping", slog.String("reason", reason(ctx, failure)))
	return errors.Join(failure, g.stop(ctx))
}

type group struct {
	log   *slog.Logger
	parts []*started
	ended chan *started
}

// started is a part whose goroutine runs. err may be read once done is closed or the
// part came through the channel ended.
type started struct {
	part   Part
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	// reported says that err is the reason of the stop and need not be added to it.
	reported bool
}

func (g *group) start(ctx context.Context, parts []Part) error {
	for _, p := range parts {
		ready := g.launch(ctx, p)
		select {
		case <-ready:
			g.log.DebugContext(ctx, "part ready", slog.String("part", p.Name))
		case s := <-g.ended:
			return early(s)
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

func (g *group) launch(ctx context.Context, p Part) <-chan struct{} {
	partCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &started{part: p, cancel: cancel, done: make(chan struct{})}
	g.parts = append(g.parts, s)
	ready := make(chan struct{}, 1)
	announce := func() {
		select {
		case ready <- struct{}{}:
		default:
		}
	}
	go func() {
		defer func() {
			close(s.done)
			g.ended <- s
		}()
		s.err = g.protect(partCtx, p, announce)
	}()
	return ready
}

// protect turns a panic into an error and forgets the cancellation that was asked for.
func (g *group) protect(ctx context.Context, p Part, ready func()) (err error) {
	defer func() {
		if v := recover(); v != nil {
			g.log.ErrorContext(ctx, "part panicked", slog.String("part", p.Name),
				slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
			err = fmt.Errorf("%s: panic: %v", p.Name, v)
		}
	}()
	err = p.Run(ctx, ready)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	return nil
}

func (g *group) wait(ctx context.Context) error {
	select {
	case s := <-g.ended:
		return early(s)
	case <-ctx.Done():
		return nil
	}
}

// early is the failure of the process that follows from the end of one part.
func early(s *started) error {
	s.reported = true
	if s.err != nil {
		return s.err
	}
	return fmt.Errorf("%s: ended without being asked to", s.part.Name)
}

// stop cancels the parts one by one, last started first, and collects their errors.
func (g *group) stop(ctx context.Context) error {
	var errs []error
	for _, s := range slices.Backward(g.parts) {
		s.cancel()
		limit := s.part.StopTimeout
		if limit <= 0 {
			limit = DefaultStopTimeout
		}
		timer := time.NewTimer(limit)
		select {
		case <-s.done:
			if !s.reported {
				errs = append(errs, s.err)
			}
			g.log.DebugContext(ctx, "part stopped", slog.String("part", s.part.Name))
		case <-timer.C:
			errs = append(errs, fmt.Errorf("%s: did not stop within %v", s.part.Name, limit))
		}
		timer.Stop()
	}
	return errors.Join(errs...)
}

func reason(ctx context.Context, failure error) string {
	if failure != nil {
		return failure.Error()
	}
	return context.Cause(ctx).Error()
}

func (g *group) notify(ctx context.Context, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		g.log.WarnContext(ctx, "service manager not notified", slog.String("state", state), slog.Any("error", err))
	}
}

// watchdog tells the service manager twice per interval that the process lives. The
// returned function ends it and waits for it.
func (g *group) watchdog(ctx context.Context) func() {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil || interval <= 0 {
		return func() {}
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(interval / 2)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				g.notify(ctx, daemon.SdNotifyWatchdog)
			case <-stop:
				return
			}
		}
	}()
	return func() {
		close(stop)
		<-done
	}
}
