// Package dispatch passes each request of the gateway along the plugins, in the order of
// (index, name).
//
// A plugin has one request in flight at a time, or as many as its rule says, and requests
// reach all plugins in the same order; different plugins work on different requests at the same
// time, so a slow plugin does not stop the others. What a plugin cannot be told now is kept
// for it. Required plugins and validators are asked here, too, and what answers want is given
// to the request as far as the plugin may want it.
//
// What a request is about, and what is made of the answers, is its maker's business.
package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/call"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
)

// Config are the times of waiting.
type Config struct {
	JoinWait     time.Duration // how long a request waits for a plugin that is joining
	RequiredWait time.Duration // how long a request waits for a plugin that it needs
}

// Parts are what requests are dispatched with.
type Parts struct {
	Log     *slog.Logger
	Roster  *roster.Roster
	Objects *object.Table
	Vet     *vet.Checker
	Caller  *call.Caller
}

// Dispatcher passes requests along. Use New.
type Dispatcher struct {
	cfg   Config
	parts Parts
}

// New makes a Dispatcher.
func New(cfg Config, parts Parts) *Dispatcher { return &Dispatcher{cfg: cfg, parts: parts} }

// begin notes what a request starts or ends and returns the plugins as they are after that.
func (d *Dispatcher) begin(r *Request) []*member.Member {
	if r.Dry != nil {
		return d.parts.Roster.Members()
	}
	if fresh := d.parts.Objects.Begin(r.Event, r.Pod, r.Container); len(fresh) > 0 {
		r.chores = append(r.chores, func() { d.parts.Objects.Enroll(fresh) })
	}
	return d.parts.Roster.Members()
}

// Send sends the request to all plugins that listen to it, one after the other, and
// returns the active plugins that did not fail it.
func (d *Dispatcher) Send(ctx context.Context, r *Request) ([]*nri.PluginInstance, error) {
	r.deadline, _ = ctx.Value(deadlineKey{}).(time.Time)
	var consulted []*nri.PluginInstance
	var held *member.Ticket
	defer func() { held.Leave() }()
	defer r.write()
	members := LegOf(ctx).within(d.begin(r))
	callers := 0
	for _, m := range members {
		if r.hears(m, r.Event) {
			callers++
		}
	}
	for _, m := range members {
		remaining := callers
		if r.hears(m, r.Event) {
			callers--
		}
		p := m.At()
		if p == member.Joining {
			held.Leave() // nobody else must wait for the one that joins
			held = nil
			if d.skipsJoining(ctx, r, m) {
				continue
			}
			p = m.At()
		}
		var ok bool
		var err error
		switch p {
		case member.Gone:
			err = d.lost(r, m)
		case member.Degraded:
			ok, err = d.passBy(ctx, r, m)
		default:
			ok, err = d.visit(ctx, r, m, &held, r.share(ctx, remaining))
		}
		if err != nil {
			return consulted, err
		}
		if ok {
			consulted = append(consulted, &nri.PluginInstance{Name: m.Info.ID.Name, Index: m.Info.ID.Index})
		}
	}
	return consulted, nil
}

// lost is for a plugin that was there when the request began.
func (d *Dispatcher) lost(r *Request, m *member.Member) error {
	if r.hears(m, r.Event) {
		return missed(r, m, plug.ErrLost)
	}
	return nil
}

// skipsJoining waits a little for a plugin that is joining, if the request is worth it,
// and else keeps the request for later. False means that the plugin is active now.
func (d *Dispatcher) skipsJoining(ctx context.Context, r *Request, m *member.Member) bool {
	hears := r.hears(m, r.Event)
	if r.Vetoable && hears && !m.Successor && d.cfg.JoinWait > 0 {
		timer := time.NewTimer(d.cfg.JoinWait)
		defer timer.Stop()
		select {
		case <-m.Joined():
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	if !m.Is(member.Joining) {
		return m.Is(member.Gone)
	}
	return d.putAside(ctx, r, m) || m.Is(member.Gone)
}

// putAside keeps the request for a plugin that cannot be told now; false means that it
// can. A plugin for which too much is kept is disconnected.
func (d *Dispatcher) putAside(ctx context.Context, r *Request, m *member.Member) bool {
	if r.Dry != nil {
		return true
	}
	e := member.Event{Kind: r.Event, Pod: r.Pod.GetId(), Container: r.Container.GetId()}
	if r.hears(m, r.Event) || r.concerns(m) && endsOrBegins(r.Event) {
		// Cloned, because the message grows with the answers of other plugins.
		e.Req = proto.Clone(r.Message())
	} else if m.At() == member.Degraded || !r.concerns(m) {
		return true
	}
	kept, full := m.Keep(e)
	if full {
		d.parts.Log.ErrorContext(ctx, "plugin disconnected: it is too far behind", slog.String("plugin", m.Info.ID.String()),
			slog.Int("events", member.MaxBacklog))
		m.End()
		m.Plugin.Close(errBehind)
	}
	return kept || full
}

// errBehind says that more is kept for a plugin than it could ever catch up with.
var errBehind = errors.New("plugin is too far behind")

// passBy takes the request past a degraded plugin, which hears of it later. A request that
// cannot do without the plugin fails at once, as it does if the plugin's policy says so.
func (d *Dispatcher) passBy(ctx context.Context, r *Request, m *member.Member) (ok bool, err error) {
	if r.hears(m, r.Event) && !r.Tolerant {
		err := missed(r, m, member.ErrDegraded)
		if err == nil && m.Info.Policy.GetFailRequest() && !m.Rule.Observe {
			err = &plug.Error{Plugin: m.Info.ID, Event: r.Event, Err: fmt.Errorf("%w: %w", member.ErrDegraded, errdefs.ErrUnavailable)}
		}
		if err != nil {
			// Nothing is kept that could prove it well; a later request has to try.
			m.Need()
			return false, err
		}
	}
	if d.putAside(ctx, r, m) {
		return !r.hears(m, r.Event), nil
	}
	// It has recovered at this very moment, or is gone.
	if m.Is(member.Gone) {
		return false, d.lost(r, m)
	}
	var held *member.Ticket
	defer func() { held.Leave() }()
	return d.visit(ctx, r, m, &held, r.share(ctx, 1))
}

// visit takes the request to one plugin. held is the turn at the plugin before; it is
// given up only after the place at this one is taken, which keeps requests in order.
func (d *Dispatcher) visit(ctx context.Context, r *Request, m *member.Member, held **member.Ticket, share time.Duration) (ok bool, err error) {
	if !r.hears(m, r.Event) && (r.Implied == 0 || !r.hears(m, r.Implied)) {
		if r.concerns(m) {
			if id := r.begins(); id != "" {
				m.Learn(id, object.Known)
			}
			if r.Claim != nil {
				r.Claim(ctx, m)
			}
		}
		return true, nil
	}
	failing := m.Fails()
	t := m.Queue.Enter()
	(*held).Leave()
	*held = t
	if m.Is(member.Degraded) {
		return d.passBy(ctx, r, m)
	}
	switch err := t.Wait(ctx, m.Plugin.Done(), failing); {
	case errors.Is(err, member.ErrDegraded):
		return d.passBy(ctx, r, m)
	case errors.Is(err, plug.ErrLost):
		return false, missed(r, m, err)
	case err != nil:
		return false, fmt.Errorf("wait for plugin %q: %s: %w", m.Info.ID, r.Event.PrettyName(), err)
	}
	if id := r.begins(); id != "" && m.Grasp(id, object.Known) && m.Told != nil {
		r.chores = append(r.chores, func() { m.Told(id, object.Known) })
	}
	if r.Claim != nil && !r.Claim(ctx, m) {
		return true, nil
	}
	if r.Dry != nil {
		r.Dry.Asked = append(r.Dry.Asked, m)
	}
	begin := time.Now()
	resp, busy, err := d.parts.Caller.Call(ctx, m, r.Event, r.Message(), share, r.meanwhile)
	if busy != nil {
		// The plugin still works on the request; nobody else gets its turn.
		*held = nil
		d.parts.Caller.Aside(func() {
			<-busy
			t.Leave()
		})
	}
	if err != nil {
		return false, d.failed(ctx, r, m, err)
	}
	return true, d.take(ctx, r, m, resp, time.Since(begin))
}
