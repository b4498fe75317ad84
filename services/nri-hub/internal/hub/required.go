package hub

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
)

// dispatchGuarded is dispatch for the requests that required plugins must answer. It
// waits a bounded time for those that are away, being synchronised or degraded.
func (h *Hub) dispatchGuarded(ctx context.Context, r *request) ([]*nri.PluginInstance, error) {
	names, err := h.Required().For(r.pod, r.container.GetName())
	if err != nil {
		return nil, fmt.Errorf("pod %s/%s: %w: %w", r.pod.GetNamespace(), r.pod.GetName(), err, errdefs.ErrInvalidArgument)
	}
	r.required = names
	leg := legOf(ctx)
	if leg == nil {
		if err := h.awaitRequired(ctx, r); err != nil {
			return nil, err
		}
	}
	consulted, err := h.dispatch(ctx, r)
	if err != nil {
		return nil, err
	}
	if leg != nil {
		leg.Consulted = append(leg.Consulted, consulted...)
		return leg.Consulted, nil
	}
	return consulted, tookPart(names, consulted)
}

// Requires names the plugins that must take part in the making of a pod, or of one of its
// containers, and says how long to wait for those that are away. Those that are degraded are
// tried.
func (h *Hub) Requires(pod *nri.PodSandbox, container string) ([]string, time.Duration, error) {
	names, err := h.Required().For(pod, container)
	if err != nil {
		return nil, 0, fmt.Errorf("pod %s/%s: %w: %w", pod.GetNamespace(), pod.GetName(), err, errdefs.ErrInvalidArgument)
	}
	h.unready(names)
	return names, h.cfg.RequiredWait, nil
}

// awaitRequired returns when every plugin that the request needs can be called, or with
// an error that names one that cannot.
func (h *Hub) awaitRequired(ctx context.Context, r *request) error {
	if len(r.required) == 0 {
		return nil
	}
	wait := h.cfg.RequiredWait
	if left, ok := r.left(ctx); ok {
		// Half of what the caller has is for the plugins themselves.
		wait = min(wait, left/2)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		missing, changed := h.unready(r.required)
		if missing == "" {
			return nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return fmt.Errorf("waited %s: %w", wait, absent(missing))
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", absent(missing), context.Cause(ctx))
		}
	}
}

// unready is the first of the named plugins that cannot be called now, and a channel that
// is closed when that may have changed.
func (h *Hub) unready(names []string) (string, <-chan struct{}) {
	h.mu.Lock()
	members, changed := h.members, h.movement
	h.mu.Unlock()
	for _, name := range names {
		ready := false
		for _, m := range members {
			if !m.info.ID.Matches(name) {
				continue
			}
			switch m.at() {
			case active:
				ready = true
			case degraded:
				m.need()
			default:
			}
		}
		if !ready {
			return name, changed
		}
	}
	return "", nil
}

// needs reports whether the request cannot do without the plugin.
func (r *request) needs(m *member) bool { return slices.ContainsFunc(r.required, m.info.ID.Matches) }

// missed is the error of a request that a plugin it needs did not answer, and nil for all
// other plugins.
func (h *Hub) missed(r *request, m *member, cause error) error {
	if !r.needs(m) {
		return nil
	}
	return fmt.Errorf("%w: %w", absent(m.info.ID.String()), cause)
}

func absent(name string) error {
	return fmt.Errorf("required plugin %q did not take part: %w", name, errdefs.ErrFailedPrecondition)
}
