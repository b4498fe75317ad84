package dispatch

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
)

// SendGuarded is Send for the requests that required plugins must answer. It
// waits a bounded time for those that are away, being synchronised or degraded.
func (d *Dispatcher) SendGuarded(ctx context.Context, r *Request) ([]*nri.PluginInstance, error) {
	names, err := d.parts.Roster.Policy().Required.For(r.Pod, r.Container.GetName())
	if err != nil {
		return nil, fmt.Errorf("pod %s/%s: %w: %w", r.Pod.GetNamespace(), r.Pod.GetName(), err, errdefs.ErrInvalidArgument)
	}
	r.required = names
	leg := LegOf(ctx)
	if leg == nil {
		if err := d.awaitRequired(ctx, r); err != nil {
			return nil, err
		}
	}
	consulted, err := d.Send(ctx, r)
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
func (d *Dispatcher) Requires(pod *nri.PodSandbox, container string) ([]string, time.Duration, error) {
	names, err := d.parts.Roster.Policy().Required.For(pod, container)
	if err != nil {
		return nil, 0, fmt.Errorf("pod %s/%s: %w: %w", pod.GetNamespace(), pod.GetName(), err, errdefs.ErrInvalidArgument)
	}
	d.unready(names)
	return names, d.cfg.RequiredWait, nil
}

// awaitRequired returns when every plugin that the request needs can be called, or with
// an error that names one that cannot.
func (d *Dispatcher) awaitRequired(ctx context.Context, r *Request) error {
	if len(r.required) == 0 {
		return nil
	}
	wait := d.cfg.RequiredWait
	if left, ok := r.left(ctx); ok {
		// Half of what the caller has is for the plugins themselves.
		wait = min(wait, left/2)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		missing, changed := d.unready(r.required)
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
func (d *Dispatcher) unready(names []string) (string, <-chan struct{}) {
	members, changed := d.parts.Roster.Watch()
	for _, name := range names {
		ready := false
		for _, m := range members {
			if !m.Info.ID.Matches(name) {
				continue
			}
			switch m.At() {
			case member.Active:
				ready = true
			case member.Degraded:
				m.Need()
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
func (r *Request) needs(m *member.Member) bool {
	return slices.ContainsFunc(r.required, m.Info.ID.Matches)
}

// missed is the error of a request that a plugin it needs did not answer, and nil for all
// other plugins.
func missed(r *Request, m *member.Member, cause error) error {
	if !r.needs(m) {
		return nil
	}
	return fmt.Errorf("%w: %w", absent(m.Info.ID.String()), cause)
}

func absent(name string) error {
	return fmt.Errorf("required plugin %q did not take part: %w", name, errdefs.ErrFailedPrecondition)
}
