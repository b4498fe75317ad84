package hub

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
)

// guarded reports whether required plugins must take part in the event.
func guarded(e nri.Event) bool {
	return e == nri.Event_RUN_POD_SANDBOX || e == nri.Event_CREATE_CONTAINER
}

// requirePresent fails a request at once when a required plugin is not there at all.
func (h *Hub) requirePresent() error {
	h.mu.Lock()
	members := h.members
	h.mu.Unlock()
	for _, name := range h.cfg.Required {
		there := slices.ContainsFunc(members, func(m *member) bool { return m.info.ID.Matches(name) && !m.is(gone) })
		if !there {
			return absent(name)
		}
	}
	return nil
}

// requireConsulted fails a request that a required plugin has not taken part in.
func (h *Hub) requireConsulted(consulted []*nri.PluginInstance) error {
	for _, name := range h.cfg.Required {
		there := slices.ContainsFunc(consulted, func(p *nri.PluginInstance) bool {
			return ID{Index: p.GetIndex(), Name: p.GetName()}.Matches(name)
		})
		if !there {
			return absent(name)
		}
	}
	return nil
}

// missed is the error of a guarded request that a required plugin did not answer, and
// nil for all other plugins and requests.
func (h *Hub) missed(r *request, m *member, cause error) error {
	if !guarded(r.event) || !slices.ContainsFunc(h.cfg.Required, m.info.ID.Matches) {
		return nil
	}
	return fmt.Errorf("%w: %w", absent(m.info.ID.String()), cause)
}

func absent(name string) error {
	return fmt.Errorf("required plugin %q did not take part: %w", name, errdefs.ErrFailedPrecondition)
}

// dispatchGuarded is dispatch for the requests that required plugins must answer.
func (h *Hub) dispatchGuarded(ctx context.Context, r *request) ([]*nri.PluginInstance, error) {
	if err := h.requirePresent(); err != nil {
		return nil, err
	}
	consulted, err := h.dispatch(ctx, r)
	if err != nil {
		return nil, err
	}
	return consulted, h.requireConsulted(consulted)
}
