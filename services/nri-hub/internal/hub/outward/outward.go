// Package outward is the way from the hub to the gateway: which one is connected, its
// inventory, and what plugins want changed outside of the answers to requests.
//
// No lock and no plugin's turn is held while the gateway is called. It may be used
// concurrently.
package outward

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/sound"
)

// Gateway is the connected gateway.
type Gateway interface {
	// Inventory asks for a snapshot of all pods and containers.
	Inventory(ctx context.Context) (plug.Inventory, error)
	// Update asks for changes of containers and returns those that failed.
	Update(ctx context.Context, plugin string, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error)
	// Done is closed when the gateway is disconnected.
	Done() <-chan struct{}
}

// Runtime is how plugins are told that the runtime is called.
type Runtime struct{ Name, Version string }

// Parts are what the link works with.
type Parts struct {
	Log     *slog.Logger
	Roster  *roster.Roster
	Vet     *vet.Checker
	Timeout time.Duration // for an update that a plugin asks the gateway for
	Runtime Runtime       // as plugins are told before a gateway has come
}

// Link is the way to the gateway. Use New.
type Link struct {
	parts Parts

	// mu guards all below.
	mu      sync.Mutex
	gateway Gateway
	runtime Runtime
	arrived chan struct{} // closed when there is a gateway
}

// New makes a link without a gateway.
func New(parts Parts) *Link {
	return &Link{parts: parts, runtime: parts.Runtime, arrived: make(chan struct{})}
}

// Attach makes gw the gateway that plugins are synchronised from. The newest one
// counts. detach must be called when it is disconnected.
func (l *Link) Attach(gw Gateway, runtime Runtime) (detach func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if runtime.Name != "" {
		l.runtime = runtime
	}
	if l.gateway == nil {
		close(l.arrived)
	}
	l.gateway = gw
	l.parts.Roster.AwaitExpected()
	return func() { l.Detach(gw) }
}

// Detach says that a gateway is disconnected.
func (l *Link) Detach(gw Gateway) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gateway != gw {
		return
	}
	l.gateway = nil
	l.arrived = make(chan struct{})
}

// Runtime is the name and the version of the runtime as the latest gateway gave them,
// or as configured before there was one.
func (l *Link) Runtime() Runtime {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.runtime
}

// current is the gateway, nil if there is none, and a channel that is closed when one comes.
func (l *Link) current() (Gateway, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.gateway, l.arrived
}

// Await returns the gateway as soon as there is one; plug.ErrLost if leave is closed before.
func (l *Link) Await(ctx context.Context, leave <-chan struct{}) (Gateway, error) {
	for {
		gw, arrived := l.current()
		if gw != nil {
			return gw, nil
		}
		select {
		case <-arrived:
		case <-leave:
			return nil, plug.ErrLost
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Update passes on what a plugin wants of its own accord and returns the updates that
// failed. A plugin may use it from inside the handling of a request. ErrUnavailable if there
// is no gateway.
func (l *Link) Update(ctx context.Context, plugin plug.ID, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error) {
	if len(updates) == 0 && len(evictions) == 0 {
		return nil, nil
	}
	gw, _ := l.current()
	members := l.parts.Roster.Members()
	var refused []*nri.ContainerUpdate
	if i := slices.IndexFunc(members, func(m *member.Member) bool { return m.Info.ID == plugin }); i >= 0 {
		updates, evictions, refused = l.allowed(ctx, members[i], updates, evictions)
		if len(updates) == 0 && len(evictions) == 0 {
			return refused, nil
		}
	}
	if gw == nil {
		return nil, fmt.Errorf("update of containers for plugin %q: no gateway is connected: %w", plugin, errdefs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, l.parts.Timeout)
	defer cancel()
	failed, err := gw.Update(ctx, plugin.String(), updates, evictions)
	if err != nil {
		return nil, fmt.Errorf("update of containers for plugin %q: %w", plugin, err)
	}
	return append(refused, failed...), nil
}

// allowed is what of a plugin's own wishes may be passed on; updates that it may not make, or
// that cannot be, are refused as a whole, as if they had failed.
func (l *Link) allowed(ctx context.Context, m *member.Member, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) (
	_ []*nri.ContainerUpdate, _ []*nri.ContainerEviction, refused []*nri.ContainerUpdate,
) {
	var pass []*nri.ContainerUpdate
	var records []vet.Record
	for _, u := range updates {
		if err := sound.Update(u); err != nil {
			l.refuse(ctx, m, err)
			refused = append(refused, u)
			continue
		}
		one := []*nri.ContainerUpdate{u}
		recs, err := l.parts.Vet.Check(ctx, m, vet.Subject{}, vet.Wanted{Updates: &one, Evict: new([]*nri.ContainerEviction)}, false)
		if err != nil || m.Rule.Observe {
			refused = append(refused, u)
		} else {
			pass = append(pass, u)
		}
		if err == nil {
			records = append(records, recs...)
		}
	}
	evictions = slices.DeleteFunc(evictions, func(e *nri.ContainerEviction) bool {
		err := sound.Eviction(e)
		if err != nil {
			l.refuse(ctx, m, err)
		}
		return err != nil
	})
	recs, _ := l.parts.Vet.Check(ctx, m, vet.Subject{}, vet.Wanted{Updates: new([]*nri.ContainerUpdate), Evict: &evictions}, true)
	for _, rec := range append(records, recs...) {
		if m.Rule.Observe {
			rec.Refused = vet.Observing
		}
		l.parts.Vet.Record(ctx, rec)
	}
	if m.Rule.Observe {
		return nil, nil, refused
	}
	return pass, evictions, refused
}

// refuse notes a wish that cannot be.
func (l *Link) refuse(ctx context.Context, m *member.Member, err error) {
	l.parts.Log.WarnContext(ctx, "plugin wants what cannot be", slog.String("plugin", m.Info.ID.String()), slog.Any("error", err))
	l.parts.Vet.Record(ctx, vet.Record{Plugin: m.Info.ID, Error: err.Error()})
}

// CarryOut performs wishes for which no plugin waits.
func (l *Link) CarryOut(ctx context.Context, m *member.Member, w member.Wish) {
	if len(w.Updates)+len(w.Evictions) == 0 {
		return
	}
	failed, err := l.Update(ctx, m.Info.ID, w.Updates, w.Evictions)
	if err != nil {
		l.parts.Log.WarnContext(ctx, "updates that a plugin asked for were lost",
			slog.String("plugin", m.Info.ID.String()), slog.Any("error", err))
		return
	}
	for _, f := range failed {
		l.parts.Log.WarnContext(ctx, "update that a plugin asked for failed",
			slog.String("plugin", m.Info.ID.String()), slog.String("container_id", f.GetContainerId()))
	}
}
