package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// request is one request of the gateway on its way along the plugins.
type request struct {
	event     nri.Event
	pod       *nri.PodSandbox
	container *nri.Container
	// message is what the next plugin is sent.
	message func() proto.Message
	// take is given each plugin's answer; nil if answers mean nothing.
	take func(plugin plug.ID, resp proto.Message) error
	// tolerant requests go on when a plugin answers with an error, which is logged.
	tolerant bool
	// vetoable requests are worth waiting for a plugin that is joining.
	vetoable bool
	// implied is an event that a plugin may be told of first; 0 for none.
	implied nri.Event
	// claim is asked before each plugin is called; nil stands for "call".
	claim func(ctx context.Context, m *member) bool
	// required are the plugins that must answer.
	required []string
	// deadline is when the caller stops waiting; zero if that is not known.
	deadline time.Time
	// dry is not nil for a rehearsal: nothing is remembered of the request, and nothing but
	// the answers comes of it.
	dry *rehearsal
	// prepare gets the taking of an answer ready while the plugin works on it; it may be nil.
	prepare func()
	// chores are notes for the ledger that are still to be written.
	chores []func()
}

// meanwhile does what can be done while a plugin works.
func (r *request) meanwhile() {
	r.write()
	if r.prepare != nil {
		r.prepare()
	}
}

// write does the chores.
func (r *request) write() {
	for _, chore := range r.chores {
		chore()
	}
	r.chores = nil
}

type deadlineKey struct{}

// WithDeadline says in a request's context until when its caller waits. That divides the
// time among the plugins; the request itself goes on after it.
func WithDeadline(ctx context.Context, deadline time.Time) context.Context {
	return context.WithValue(ctx, deadlineKey{}, deadline)
}

// left is the time that the caller has left, if that is known.
func (r *request) left(ctx context.Context) (time.Duration, bool) {
	end := r.deadline
	if d, ok := ctx.Deadline(); ok && (end.IsZero() || d.Before(end)) {
		end = d
	}
	if end.IsZero() {
		return 0, false
	}
	return max(time.Until(end), 0), true
}

// minShare is what a plugin gets of a caller's time at least. The request goes on after
// its caller, so a healthy plugin is not to be passed by for a caller in a hurry.
const minShare = 250 * time.Millisecond

// share is what one of n plugins gets of the caller's time; zero means that it does not
// matter. A tenth is left for what comes after the plugins.
func (r *request) share(ctx context.Context, n int) time.Duration {
	left, ok := r.left(ctx)
	if !ok || n < 1 {
		return 0
	}
	return max(left*9/10/time.Duration(n), minShare)
}

// hears reports whether the plugin gets the event: it has subscribed to it, and the pod is
// one of those that its rule chooses or that cannot do without it.
func (r *request) hears(m *member, e nri.Event) bool {
	return m.listensTo(e) && (m.rule.Pods.Match(r.pod) || r.needs(m))
}

// dispatch sends the request to all plugins that listen to it, one after the other, and
// returns the active plugins that did not fail it.
func (h *Hub) dispatch(ctx context.Context, r *request) ([]*nri.PluginInstance, error) {
	r.deadline, _ = ctx.Value(deadlineKey{}).(time.Time)
	var consulted []*nri.PluginInstance
	var held *ticket
	defer func() { held.leave() }()
	defer r.write()
	members := legOf(ctx).within(h.begin(r))
	callers := 0
	for _, m := range members {
		if r.hears(m, r.event) {
			callers++
		}
	}
	for _, m := range members {
		remaining := callers
		if r.hears(m, r.event) {
			callers--
		}
		p := m.at()
		if p == joining {
			held.leave() // nobody else must wait for the one that joins
			held = nil
			if h.skipsJoining(ctx, r, m) {
				continue
			}
			p = m.at()
		}
		var ok bool
		var err error
		switch p {
		case gone:
			err = h.lost(r, m)
		case degraded:
			ok, err = h.passBy(ctx, r, m)
		default:
			ok, err = h.visit(ctx, r, m, &held, r.share(ctx, remaining))
		}
		if err != nil {
			return consulted, err
		}
		if ok {
			consulted = append(consulted, &nri.PluginInstance{Name: m.info.ID.Name, Index: m.info.ID.Index})
		}
	}
	return consulted, nil
}

// lost is for a plugin that was there when the request began.
func (h *Hub) lost(r *request, m *member) error {
	if r.hears(m, r.event) {
		return h.missed(r, m, plug.ErrLost)
	}
	return nil
}

// skipsJoining waits a little for a plugin that is joining, if the request is worth it,
// and else keeps the request for later. False means that the plugin is active now.
func (h *Hub) skipsJoining(ctx context.Context, r *request, m *member) bool {
	hears := r.hears(m, r.event)
	if r.vetoable && hears && !m.successor && h.cfg.JoinWait > 0 {
		timer := time.NewTimer(h.cfg.JoinWait)
		defer timer.Stop()
		select {
		case <-m.joined:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	if !m.is(joining) {
		return m.is(gone)
	}
	return h.putAside(ctx, r, m) || m.is(gone)
}

// putAside keeps the request for a plugin that cannot be told now; false means that it
// can. A plugin for which too much is kept is disconnected.
func (h *Hub) putAside(ctx context.Context, r *request, m *member) bool {
	if r.dry != nil {
		return true
	}
	e := event{kind: r.event, pod: r.pod.GetId(), container: r.container.GetId()}
	if r.hears(m, r.event) || m.rule.Pods.Match(r.pod) && endsOrBegins(r.event) {
		// Cloned, because the message grows with the answers of other plugins.
		e.req = proto.Clone(r.message())
	} else if m.at() == degraded || !m.rule.Pods.Match(r.pod) {
		return true
	}
	kept, full := m.keep(e)
	if full {
		h.Log.ErrorContext(ctx, "plugin disconnected: it is too far behind", slog.String("plugin", m.info.ID.String()),
			slog.Int("events", maxBacklog))
		m.end()
		m.plugin.Close(errBehind)
	}
	return kept || full
}

// errBehind says that more is kept for a plugin than it could ever catch up with.
var errBehind = errors.New("plugin is too far behind")

// endsOrBegins reports whether the event is kept even for a plugin that does not listen
// to it, because it says which objects the plugin knows.
func endsOrBegins(e nri.Event) bool {
	switch e {
	case nri.Event_RUN_POD_SANDBOX, nri.Event_CREATE_CONTAINER,
		nri.Event_STOP_POD_SANDBOX, nri.Event_REMOVE_POD_SANDBOX,
		nri.Event_STOP_CONTAINER, nri.Event_REMOVE_CONTAINER:
		return true
	default:
		return false
	}
}

// passBy takes the request past a degraded plugin, which hears of it later. A request that
// cannot do without the plugin fails at once, as it does if the plugin's policy says so.
func (h *Hub) passBy(ctx context.Context, r *request, m *member) (ok bool, err error) {
	if r.hears(m, r.event) && !r.tolerant {
		err := h.missed(r, m, errDegraded)
		if err == nil && m.info.Policy.GetFailRequest() && !m.rule.Observe {
			err = &plug.Error{Plugin: m.info.ID, Event: r.event, Err: fmt.Errorf("%w: %w", errDegraded, errdefs.ErrUnavailable)}
		}
		if err != nil {
			// Nothing is kept that could prove it well; a later request has to try.
			m.need()
			return false, err
		}
	}
	if h.putAside(ctx, r, m) {
		return !r.hears(m, r.event), nil
	}
	// It has recovered at this very moment, or is gone.
	if m.is(gone) {
		return false, h.lost(r, m)
	}
	var held *ticket
	defer func() { held.leave() }()
	return h.visit(ctx, r, m, &held, r.share(ctx, 1))
}

// visit takes the request to one plugin. held is the turn at the plugin before; it is
// given up only after the place at this one is taken, which keeps requests in order.
func (h *Hub) visit(ctx context.Context, r *request, m *member, held **ticket, share time.Duration) (ok bool, err error) {
	if !r.hears(m, r.event) && (r.implied == 0 || !r.hears(m, r.implied)) {
		if m.rule.Pods.Match(r.pod) {
			if id := r.begins(); id != "" {
				m.learn(id, known)
			}
			if r.claim != nil {
				r.claim(ctx, m)
			}
		}
		return true, nil
	}
	failing := m.fails()
	t := m.queue.enter()
	(*held).leave()
	*held = t
	if m.is(degraded) {
		return h.passBy(ctx, r, m)
	}
	switch err := t.wait(ctx, m.plugin.Done(), failing); {
	case errors.Is(err, errDegraded):
		return h.passBy(ctx, r, m)
	case errors.Is(err, plug.ErrLost):
		return false, h.missed(r, m, err)
	case err != nil:
		return false, fmt.Errorf("wait for plugin %q: %s: %w", m.info.ID, r.event.PrettyName(), err)
	}
	if id := r.begins(); id != "" && m.grasp(id, known) && m.told != nil {
		r.chores = append(r.chores, func() { m.told(id, known) })
	}
	if r.claim != nil && !r.claim(ctx, m) {
		return true, nil
	}
	if r.dry != nil {
		r.dry.asked = append(r.dry.asked, m)
	}
	begin := time.Now()
	resp, busy, err := h.call(ctx, m, r.event, r.message(), share, r.meanwhile)
	if busy != nil {
		// The plugin still works on the request; nobody else gets its turn.
		*held = nil
		h.calls.Go(func() {
			<-busy
			t.leave()
		})
	}
	if err != nil {
		return false, h.failed(ctx, r, m, err)
	}
	return true, h.take(ctx, r, m, resp, time.Since(begin))
}

// begins is the id of the object that plugins know of from this request on; empty for all
// other requests, and for rehearsals.
func (r *request) begins() string {
	switch {
	case r.dry != nil:
		return ""
	case r.event == nri.Event_RUN_POD_SANDBOX:
		return r.pod.GetId()
	case r.event == nri.Event_CREATE_CONTAINER:
		return r.container.GetId()
	default:
		return ""
	}
}

// failed decides what a plugin's failure means for the request.
func (h *Hub) failed(ctx context.Context, r *request, m *member, err error) error {
	perr, ok := errors.AsType[*plug.Error](err)
	if !ok {
		return err
	}
	h.keepRecord(ctx, r, Record{Plugin: m.info.ID, Event: r.event, Pod: r.pod, Container: r.container, Error: perr.Err.Error()})
	unanswered := errors.Is(err, plug.ErrLost) || errors.Is(err, errTimeout)
	if unanswered && !r.tolerant {
		if m.info.Policy.GetFailRequest() && !m.rule.Observe {
			return err
		}
		if err := h.missed(r, m, err); err != nil {
			return err
		}
	}
	if !unanswered && !r.tolerant && !m.rule.Observe {
		return err
	}
	h.Log.WarnContext(ctx, "request goes on without the plugin", slog.String("plugin", m.info.ID.String()),
		slog.String("event", r.event.PrettyName()), slog.Any("error", err))
	return nil
}
