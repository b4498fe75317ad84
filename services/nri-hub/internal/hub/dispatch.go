package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// request is one request of the gateway on its way along the plugins.
type request struct {
	event     nri.Event
	pod       *nri.PodSandbox
	container *nri.Container
	// message is what the next plugin is sent.
	message func() proto.Message
	// take is given each plugin's answer; nil if answers mean nothing.
	take func(plugin ID, resp proto.Message) error
	// tolerant requests go on when a plugin answers with an error, which is logged.
	tolerant bool
	// vetoable requests are worth waiting for a plugin that is joining.
	vetoable bool
	// implied is an event that a plugin may be told of first; 0 for none.
	implied nri.Event
	// claim is asked before each plugin is called; nil stands for "call".
	claim func(ctx context.Context, m *member) bool
}

// dispatch sends the request to all plugins that listen to it, one after the other, and
// returns the active plugins that did not fail it.
func (h *Hub) dispatch(ctx context.Context, r *request) ([]*nri.PluginInstance, error) {
	var consulted []*nri.PluginInstance
	var held *ticket
	defer func() { held.leave() }()
	for _, m := range h.begin(r) {
		if m.is(gone) {
			continue
		}
		if m.is(joining) {
			held.leave() // nobody else must wait for the one that joins
			held = nil
			if h.skipsJoining(ctx, r, m) {
				continue
			}
		}
		ok, err := h.visit(ctx, r, m, &held)
		if err != nil {
			return consulted, err
		}
		if ok {
			consulted = append(consulted, &nri.PluginInstance{Name: m.info.ID.Name, Index: m.info.ID.Index})
		}
	}
	return consulted, nil
}

// skipsJoining waits a little for a plugin that is joining, if the request is worth it,
// and else keeps the request for later. False means that the plugin is active now.
func (h *Hub) skipsJoining(ctx context.Context, r *request, m *member) bool {
	if r.vetoable && m.listensTo(r.event) && !m.successor && h.cfg.JoinWait > 0 {
		timer := time.NewTimer(h.cfg.JoinWait)
		defer timer.Stop()
		select {
		case <-m.joined:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	e := event{kind: r.event, pod: r.pod.GetId(), container: r.container.GetId()}
	if m.listensTo(r.event) || endsOrBegins(r.event) {
		// Cloned, because the message grows with the answers of other plugins.
		e.req = proto.Clone(r.message())
	}
	return m.keep(e) || m.is(gone)
}

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

// visit takes the request to one plugin. held is the turn at the plugin before; it is
// given up only after the place at this one is taken, which keeps requests in order.
func (h *Hub) visit(ctx context.Context, r *request, m *member, held **ticket) (ok bool, err error) {
	if !m.listensTo(r.event) && (r.implied == 0 || !m.listensTo(r.implied)) {
		h.note(r, m)
		if r.claim != nil {
			r.claim(ctx, m)
		}
		return true, nil
	}
	t := m.queue.enter()
	(*held).leave()
	*held = t
	if err := t.wait(ctx, m.plugin.Done()); err != nil {
		if errors.Is(err, ErrLost) {
			return false, h.missed(r, m, err)
		}
		return false, fmt.Errorf("wait for plugin %q: %s: %w", m.info.ID, r.event.PrettyName(), err)
	}
	h.note(r, m)
	if r.claim != nil && !r.claim(ctx, m) {
		return true, nil
	}
	resp, err := h.call(ctx, m, r.event, r.message())
	if err != nil {
		return false, h.failed(ctx, r, m, err)
	}
	if r.take == nil {
		return true, nil
	}
	return true, r.take(m.info.ID, resp)
}

// note remembers what the plugin knows of from now on.
func (h *Hub) note(r *request, m *member) {
	switch r.event {
	case nri.Event_RUN_POD_SANDBOX:
		m.learn(r.pod.GetId(), known)
	case nri.Event_CREATE_CONTAINER:
		m.learn(r.container.GetId(), known)
	default:
	}
}

// call makes one call with the plugin's time limit. It disconnects a plugin that did
// not answer, unless the plugin's policy says otherwise for a timeout.
func (h *Hub) call(ctx context.Context, m *member, e nri.Event, req proto.Message) (proto.Message, error) {
	if !m.listensTo(e) {
		return nil, nil
	}
	cctx, cancel := context.WithTimeout(ctx, h.cfg.RequestTimeout)
	defer cancel()
	resp, err := m.plugin.Call(cctx, e, req)
	if err == nil {
		m.record(nil)
		return resp, nil
	}
	if ctx.Err() != nil {
		// The caller has gone; that is nobody's failure.
		return nil, fmt.Errorf("plugin %q: %s: %w", m.info.ID, e.PrettyName(), context.Cause(ctx))
	}
	timedOut := errors.Is(err, context.DeadlineExceeded)
	perr := &PluginError{Plugin: m.info.ID, Event: e, Err: err}
	if timedOut {
		perr.Err = fmt.Errorf("%w: no answer within %s", errTimeout, h.cfg.RequestTimeout)
	}
	m.record(perr)
	if errors.Is(err, ErrLost) || timedOut && !m.info.Policy.GetKeepConnected() {
		h.Log.ErrorContext(ctx, "plugin disconnected", slog.String("plugin", m.info.ID.String()),
			slog.String("event", e.PrettyName()), slog.Any("error", perr.Err))
		m.become(gone)
		m.plugin.Close(perr)
	}
	return nil, perr
}

// failed decides what a plugin's failure means for the request.
func (h *Hub) failed(ctx context.Context, r *request, m *member, err error) error {
	if _, ok := errors.AsType[*PluginError](err); !ok {
		return err
	}
	unanswered := errors.Is(err, ErrLost) || errors.Is(err, errTimeout)
	if unanswered && !r.tolerant {
		if m.info.Policy.GetFailRequest() {
			return err
		}
		if err := h.missed(r, m, err); err != nil {
			return err
		}
	}
	if !unanswered && !r.tolerant {
		return err
	}
	h.Log.WarnContext(ctx, "request goes on without the plugin", slog.String("plugin", m.info.ID.String()),
		slog.String("event", r.event.PrettyName()), slog.Any("error", err))
	return nil
}

// errTimeout says that a plugin did not answer in time.
var errTimeout = errors.New("timeout")
