package hub

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
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

// Attach makes gw the gateway that plugins are synchronised from. The newest one
// counts. detach must be called when it is disconnected.
func (h *Hub) Attach(gw Gateway, runtime Runtime) (detach func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if runtime.Name != "" {
		h.runtime = runtime
	}
	if h.gateway == nil {
		close(h.arrived)
	}
	h.gateway = gw
	if !h.settled && h.settling == nil && !h.stopping {
		h.settling = time.AfterFunc(h.cfg.SettleTimeout, h.settle)
	}
	return func() { h.detach(gw) }
}

// Runtime is the name and the version of the runtime as the latest gateway gave them,
// or as configured before there was one.
func (h *Hub) Runtime() (name, version string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.runtime.Name, h.runtime.Version
}

// RequestTimeout is the time that a plugin has for one call, where its rule does not say
// otherwise for single requests.
func (h *Hub) RequestTimeout(plugin plug.ID) time.Duration {
	if d := h.policy.Load().plugins.For(plugin.Index, plugin.Name).Timeout; d > 0 {
		return d
	}
	return h.cfg.RequestTimeout
}

// Admit returns why a plugin is not welcome: because there is no rule for it although one
// is wanted, or because its process is not one of those that may be the plugin.
func (h *Hub) Admit(info plug.Info) error {
	r := h.policy.Load().plugins.For(info.ID.Index, info.ID.Name)
	if !r.Listed && h.policy.Load().listedOnly {
		return fmt.Errorf("plugin %q is not listed in the configuration: %w", info.ID, errdefs.ErrPermissionDenied)
	}
	if info.Kind != plug.External {
		return nil // put where the hub finds it by who may do so
	}
	if err := r.Rights.Identify(info.UID, info.GID, info.Executable); err != nil {
		return fmt.Errorf("plugin %q: process %d: %w: %w", info.ID, info.PID, err, errdefs.ErrPermissionDenied)
	}
	return nil
}

func (h *Hub) detach(gw Gateway) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gateway != gw {
		return
	}
	h.gateway = nil
	h.arrived = make(chan struct{})
}

// awaitGateway returns the gateway as soon as there is one.
func (h *Hub) awaitGateway(ctx context.Context, leave <-chan struct{}) (Gateway, error) {
	for {
		h.mu.Lock()
		gw, arrived := h.gateway, h.arrived
		h.mu.Unlock()
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
// failed. It holds no lock and no plugin's turn, so a plugin may use it from inside the
// handling of a request. ErrUnavailable if there is no gateway.
func (h *Hub) Update(ctx context.Context, plugin plug.ID, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error) {
	if len(updates) == 0 && len(evictions) == 0 {
		return nil, nil
	}
	h.mu.Lock()
	gw, members := h.gateway, h.members
	h.mu.Unlock()
	var refused []*nri.ContainerUpdate
	if i := slices.IndexFunc(members, func(m *member) bool { return m.info.ID == plugin }); i >= 0 {
		updates, evictions, refused = h.allowed(ctx, members[i], updates, evictions)
		if len(updates) == 0 && len(evictions) == 0 {
			return refused, nil
		}
	}
	if gw == nil {
		return nil, fmt.Errorf("update of containers for plugin %q: no gateway is connected: %w", plugin, errdefs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, h.cfg.UpdateTimeout)
	defer cancel()
	failed, err := gw.Update(ctx, plugin.String(), updates, evictions)
	if err != nil {
		return nil, fmt.Errorf("update of containers for plugin %q: %w", plugin, err)
	}
	return append(refused, failed...), nil
}

// allowed is what of a plugin's own wishes may be passed on; updates that it may not make
// are refused as a whole, as if they had failed.
func (h *Hub) allowed(ctx context.Context, m *member, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) (
	_ []*nri.ContainerUpdate, _ []*nri.ContainerEviction, refused []*nri.ContainerUpdate,
) {
	var pass []*nri.ContainerUpdate
	var records []Record
	for _, u := range updates {
		one := []*nri.ContainerUpdate{u}
		recs, err := h.vet(ctx, m, subject{}, wanted{updates: &one, evict: new([]*nri.ContainerEviction)}, false)
		if err != nil || m.rule.Observe {
			refused = append(refused, u)
		} else {
			pass = append(pass, u)
		}
		if err == nil {
			records = append(records, recs...)
		}
	}
	recs, _ := h.vet(ctx, m, subject{}, wanted{updates: new([]*nri.ContainerUpdate), evict: &evictions}, true)
	for _, rec := range append(records, recs...) {
		if m.rule.Observe {
			rec.Refused = observing
		}
		h.record(ctx, rec)
	}
	if m.rule.Observe {
		return nil, nil, refused
	}
	return pass, evictions, refused
}

// carryOut performs wishes for which no plugin waits.
func (h *Hub) carryOut(ctx context.Context, m *member, w wish) {
	if len(w.updates)+len(w.evictions) == 0 {
		return
	}
	failed, err := h.Update(ctx, m.info.ID, w.updates, w.evictions)
	if err != nil {
		h.Log.WarnContext(ctx, "updates that a plugin asked for were lost",
			slog.String("plugin", m.info.ID.String()), slog.Any("error", err))
		return
	}
	for _, f := range failed {
		h.Log.WarnContext(ctx, "update that a plugin asked for failed",
			slog.String("plugin", m.info.ID.String()), slog.String("container_id", f.GetContainerId()))
	}
}
