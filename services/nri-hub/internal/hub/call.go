package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// patience is how long a late answer is waited for aside.
const patience = 10 * time.Minute

// errTimeout says that a plugin did not answer in time.
var errTimeout = errors.New("timeout")

// errDegraded says that a plugin is not called because it has not answered before.
var errDegraded = errors.New("plugin is degraded: it has not answered in time")

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
func (h *Hub) limit(m *member, e nri.Event, share time.Duration) (limit time.Duration, full bool) {
	limit = m.rule.TimeoutOf(e)
	if limit <= 0 {
		limit = h.cfg.RequestTimeout
	}
	if share > 0 && share < limit {
		return share, false
	}
	return limit, true
}

// call makes one call with the plugin's time limit, or with share if that is less and not
// zero. When the caller has gone meanwhile, busy is closed when the plugin has answered or
// its time is up; else it is nil. meanwhile is called while the plugin works; it may be nil.
func (h *Hub) call(ctx context.Context, m *member, e nri.Event, req proto.Message, share time.Duration, meanwhile func()) (_ proto.Message, busy <-chan struct{}, _ error) {
	if !m.listensTo(e) {
		return nil, nil, nil
	}
	limit, full := h.limit(m, e, share)
	begin := time.Now()
	base, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit+patience)
	answers := make(chan answer, 1)
	h.calls.Add(1)
	m.run.Go(func() {
		defer h.calls.Done()
		defer cancel()
		resp, err := m.plugin.Call(untilLate{base, begin.Add(limit)}, e, req) //nolint:contextcheck // outlives the request
		answers <- answer{resp, err}
	})
	if meanwhile != nil {
		meanwhile()
	}
	timer := time.NewTimer(time.Until(begin.Add(limit)))
	defer timer.Stop()
	var a answer
	select {
	case a = <-answers:
	case <-timer.C:
		a = h.late(ctx, m, e, req, answers)
	case <-ctx.Done():
		// The caller has gone; that is nobody's failure.
		busy := h.abandoned(ctx, m, e, answers, time.Until(begin.Add(limit)))
		return nil, busy, fmt.Errorf("plugin %q: %s: %w", m.info.ID, e.PrettyName(), context.Cause(ctx))
	}
	if a.err == nil {
		m.record(e, nil, time.Since(begin))
		return a.resp, nil, nil
	}
	perr := &plug.Error{Plugin: m.info.ID, Event: e, Err: a.err}
	if errors.Is(a.err, context.DeadlineExceeded) {
		perr.Err = fmt.Errorf("%w: no answer within %s", errTimeout, limit)
		if h.TimedOut != nil {
			h.TimedOut(m.info.ID, e)
		}
	}
	m.record(e, perr, 0)
	h.sanction(ctx, m, perr, full)
	return nil, nil, perr
}

// late is the outcome of a call whose time is up, and has its answer waited for aside.
func (h *Hub) late(ctx context.Context, m *member, e nri.Event, req proto.Message, answers <-chan answer) answer {
	m.late()
	h.calls.Go(func() {
		a := <-answers
		m.answered()
		if a.err != nil {
			return
		}
		h.Log.InfoContext(ctx, "plugin answered late", slog.String("plugin", m.info.ID.String()), slog.String("event", e.PrettyName()))
		h.belated(context.WithoutCancel(ctx), m, event{kind: e, container: containerOf(req), req: req}, a.resp)
	})
	return answer{err: context.DeadlineExceeded}
}

// abandoned watches a call whose caller has gone: the plugin still has to answer it in
// time, and until then it gets no other.
func (h *Hub) abandoned(ctx context.Context, m *member, e nri.Event, answers <-chan answer, left time.Duration) <-chan struct{} {
	ctx = context.WithoutCancel(ctx)
	busy := make(chan struct{})
	h.calls.Go(func() {
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-answers:
			close(busy)
			return
		case <-timer.C:
		}
		perr := &plug.Error{Plugin: m.info.ID, Event: e, Err: fmt.Errorf("%w: the caller has gone meanwhile", errTimeout)}
		m.record(e, perr, 0)
		m.late()
		h.sanction(ctx, m, perr, true)
		close(busy)
		<-answers
		m.answered()
	})
	return busy
}

// belated does what can still be done of an answer that came too late.
func (h *Hub) belated(ctx context.Context, m *member, e event, resp proto.Message) {
	w, _ := lateWish(e, resp)
	if len(w.updates)+len(w.evictions) > 0 {
		h.carryOut(ctx, m, w)
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
func (h *Hub) sanction(ctx context.Context, m *member, err *plug.Error, full bool) {
	timedOut := errors.Is(err, errTimeout)
	switch {
	case errors.Is(err, plug.ErrLost):
	case !timedOut, !full:
		return
	case h.disconnects(m):
	default:
		if m.timedOut() < max(h.cfg.DegradeAfter, 1) {
			return
		}
		if m.degrade(err.Event, h.cfg.MinPause, h.cfg.MaxPause) {
			h.Log.WarnContext(ctx, "plugin degraded: requests go on without it and are delivered to it aside",
				slog.String("plugin", m.info.ID.String()), slog.String("event", err.Event.PrettyName()), slog.Any("error", err.Err))
			h.moved()
		}
		return
	}
	h.Log.ErrorContext(ctx, "plugin disconnected", slog.String("plugin", m.info.ID.String()),
		slog.String("event", err.Event.PrettyName()), slog.Any("error", err.Err))
	m.end()
	m.plugin.Close(err)
}

// disconnects reports whether a timeout ends the connection. What the plugin itself asks
// for comes first, then the rule.
func (h *Hub) disconnects(m *member) bool {
	if m.info.Policy != nil {
		return !m.info.Policy.GetKeepConnected()
	}
	return m.rule.Disconnect
}
