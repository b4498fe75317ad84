// Package call makes the calls of plugins, each with its time limit, and decides what a failed
// one means for the plugin: that it is gone, or that it is degraded, until what was kept for it
// is delivered aside. What a failure means for the request is its caller's business.
//
// Late answers are seen, and what can still be done of them is done.
package call

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
)

// Config are the limits of calls.
type Config struct {
	RequestTimeout time.Duration // for one call of one plugin
	DegradeAfter   int           // timeouts in a row that make a plugin degraded; less than one means one
	MinPause       time.Duration // before a degraded plugin is tried first
	MaxPause       time.Duration // the longest time before a degraded plugin is tried again
}

// Parts are what calls are made with.
type Parts struct {
	Log     *slog.Logger
	Roster  *roster.Roster
	Outward *outward.Link
	// TimedOut is told of a call that was not answered in time; it may be nil.
	TimedOut func(plugin plug.ID, e nri.Event)
}

// Caller makes the calls. Use New.
type Caller struct {
	cfg   Config
	parts Parts

	// calls are those under way, and what waits for their late answers.
	calls sync.WaitGroup
}

// New makes a Caller.
func New(cfg Config, parts Parts) *Caller { return &Caller{cfg: cfg, parts: parts} }

// Wait returns when no call is under way any more.
func (c *Caller) Wait() { c.calls.Wait() }

// Aside runs f, which is waited for like a call.
func (c *Caller) Aside(f func()) { c.calls.Go(f) }

// Dismiss says goodbye to a plugin before its connection is closed.
func (c *Caller) Dismiss(ctx context.Context, m *member.Member, cause error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.RequestTimeout)
	defer cancel()
	if err := m.Plugin.Shutdown(ctx); err != nil {
		c.parts.Log.DebugContext(ctx, "plugin did not answer its shutdown",
			slog.String("plugin", m.Info.ID.String()), slog.Any("error", err))
	}
	m.Plugin.Close(cause)
}

// patience is how long a late answer is waited for aside.
const patience = 10 * time.Minute

// ErrTimeout says that a plugin did not answer in time.
var ErrTimeout = errors.New("timeout")

// answer is what came of a call.
type answer struct {
	resp proto.Message
	err  error
}

// untilLate is the context of a call: the plugin is told the time limit, but the call
// itself goes on after it, so that a late answer is seen. It does not end with the
// request, because the plugin works on all the same.
type untilLate struct {
	context.Context //nolint:containedctx // it is a context itself, with another deadline

	deadline time.Time
}

// Deadline is what the plugin is told.
func (c untilLate) Deadline() (time.Time, bool) { return c.deadline, true }

// limit is the time that the plugin has for one call; ours says that it is the plugin's
// full limit and not what the caller has left.
func (c *Caller) limit(m *member.Member, e nri.Event, share time.Duration) (limit time.Duration, full bool) {
	limit = m.Rule.TimeoutOf(e)
	if limit <= 0 {
		limit = c.cfg.RequestTimeout
	}
	if share > 0 && share < limit {
		return share, false
	}
	return limit, true
}

// Call makes one call with the plugin's time limit, or with share if that is less and not
// zero. When the caller has gone meanwhile, busy is closed when the plugin has answered or
// its time is up; else it is nil. meanwhile is called while the plugin works; it may be nil.
func (c *Caller) Call(ctx context.Context, m *member.Member, e nri.Event, req proto.Message, share time.Duration, meanwhile func()) (_ proto.Message, busy <-chan struct{}, _ error) {
	if !m.ListensTo(e) {
		return nil, nil, nil
	}
	limit, full := c.limit(m, e, share)
	begin := time.Now()
	base, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit+patience)
	answers := make(chan answer, 1)
	c.calls.Add(1)
	m.Go(func() {
		defer c.calls.Done()
		defer cancel()
		resp, err := m.Plugin.Call(untilLate{base, begin.Add(limit)}, e, req) //nolint:contextcheck // outlives the request
		answers <- answer{resp, err}
	})
	if meanwhile != nil {
		runtime.Gosched() // the request goes out first
		meanwhile()
	}
	timer := time.NewTimer(time.Until(begin.Add(limit)))
	defer timer.Stop()
	var a answer
	select {
	case a = <-answers:
	case <-timer.C:
		a = c.late(ctx, m, e, req, answers)
	case <-ctx.Done():
		// The caller has gone; that is nobody's failure.
		busy := c.abandoned(ctx, m, e, answers, time.Until(begin.Add(limit)))
		return nil, busy, fmt.Errorf("plugin %q: %s: %w", m.Info.ID, e.PrettyName(), context.Cause(ctx))
	}
	if a.err == nil {
		m.Record(e, nil, time.Since(begin))
		return a.resp, nil, nil
	}
	perr := &plug.Error{Plugin: m.Info.ID, Event: e, Err: a.err}
	if errors.Is(a.err, context.DeadlineExceeded) {
		perr.Err = fmt.Errorf("%w: no answer within %s", ErrTimeout, limit)
		if c.parts.TimedOut != nil {
			c.parts.TimedOut(m.Info.ID, e)
		}
	}
	m.Record(e, perr, 0)
	c.sanction(ctx, m, perr, full)
	return nil, nil, perr
}

// late is the outcome of a call whose time is up, and has its answer waited for aside.
func (c *Caller) late(ctx context.Context, m *member.Member, e nri.Event, req proto.Message, answers <-chan answer) answer {
	m.Late()
	c.calls.Go(func() {
		a := <-answers
		m.Answered()
		if a.err != nil {
			return
		}
		c.parts.Log.InfoContext(ctx, "plugin answered late", slog.String("plugin", m.Info.ID.String()), slog.String("event", e.PrettyName()))
		c.belated(context.WithoutCancel(ctx), m, member.Event{Kind: e, Container: containerOf(req), Req: req}, a.resp)
	})
	return answer{err: context.DeadlineExceeded}
}

// abandoned watches a call whose caller has gone: the plugin still has to answer it in
// time, and until then it gets no other.
func (c *Caller) abandoned(ctx context.Context, m *member.Member, e nri.Event, answers <-chan answer, left time.Duration) <-chan struct{} {
	ctx = context.WithoutCancel(ctx)
	busy := make(chan struct{})
	c.calls.Go(func() {
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-answers:
			close(busy)
			return
		case <-timer.C:
		}
		perr := &plug.Error{Plugin: m.Info.ID, Event: e, Err: fmt.Errorf("%w: the caller has gone meanwhile", ErrTimeout)}
		m.Record(e, perr, 0)
		m.Late()
		c.sanction(ctx, m, perr, true)
		close(busy)
		<-answers
		m.Answered()
	})
	return busy
}

// belated does what can still be done of an answer that came too late.
func (c *Caller) belated(ctx context.Context, m *member.Member, e member.Event, resp proto.Message) {
	w, _ := lateWish(e, resp)
	if len(w.Updates)+len(w.Evictions) > 0 {
		c.parts.Outward.CarryOut(ctx, m, w)
	}
}

func containerOf(req proto.Message) string {
	if r, ok := req.(interface{ GetContainer() *nri.Container }); ok {
		return r.GetContainer().GetId()
	}
	return ""
}

// sanction decides what becomes of a plugin that has failed a call. A lost one is gone.
// One that does not answer is degraded, or disconnected if its policy or its rule say so.
// A caller that had less time than the plugin's limit says nothing about the plugin.
func (c *Caller) sanction(ctx context.Context, m *member.Member, err *plug.Error, full bool) {
	timedOut := errors.Is(err, ErrTimeout)
	switch {
	case errors.Is(err, plug.ErrLost):
	case !timedOut, !full:
		return
	case c.disconnects(m):
	default:
		if m.TimedOut() < max(c.cfg.DegradeAfter, 1) {
			return
		}
		if m.Degrade(err.Event, c.cfg.MinPause, c.cfg.MaxPause) {
			c.parts.Log.WarnContext(ctx, "plugin degraded: requests go on without it and are delivered to it aside",
				slog.String("plugin", m.Info.ID.String()), slog.String("event", err.Event.PrettyName()), slog.Any("error", err.Err))
			c.parts.Roster.Moved()
		}
		return
	}
	c.parts.Log.ErrorContext(ctx, "plugin disconnected", slog.String("plugin", m.Info.ID.String()),
		slog.String("event", err.Event.PrettyName()), slog.Any("error", err.Err))
	m.End()
	m.Plugin.Close(err)
}

// disconnects reports whether a timeout ends the connection. What the plugin itself asks
// for comes first, then the rule.
func (c *Caller) disconnects(m *member.Member) bool {
	if m.Info.Policy != nil {
		return !m.Info.Policy.GetKeepConnected()
	}
	return m.Rule.Disconnect
}
