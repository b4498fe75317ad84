package dispatch

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
)

// Validate asks the configured validator and all validating plugins, side by side. Who
// does not answer refuses.
func (d *Dispatcher) Validate(ctx context.Context, r *Request, req *nri.ValidateContainerAdjustmentRequest) error {
	refused := func(who string, err error) error {
		if ctx.Err() != nil {
			return fmt.Errorf("validate the adjustment of container %q: %w", req.GetContainer().GetId(), err)
		}
		return fmt.Errorf("adjustment of container %q refused by %s: %w: %v",
			req.GetContainer().GetId(), who, errdefs.ErrFailedPrecondition, err) //nolint:errorlint // the cause's class must not win
	}
	if v := d.parts.Roster.Policy().Validator; v != nil {
		if err := v.ValidateContainerAdjustment(ctx, req); err != nil {
			return refused("the default validator", err)
		}
	}
	members := d.parts.Roster.Members()
	g, gctx := errgroup.WithContext(ctx)
	for _, m := range members {
		if !r.hears(m, nri.Event_VALIDATE_CONTAINER_ADJUSTMENT) || !m.Serves() || m.Rule.Observe {
			continue
		}
		g.Go(func() error {
			failing := m.Fails()
			if m.Is(member.Degraded) {
				return refused("plugin "+m.Info.ID.String(), member.ErrDegraded)
			}
			t := m.Queue.Enter()
			defer t.Leave()
			if err := t.Wait(gctx, m.Plugin.Done(), failing); err != nil {
				return refused("plugin "+m.Info.ID.String(), err)
			}
			resp, _, err := d.parts.Caller.Call(gctx, m, nri.Event_VALIDATE_CONTAINER_ADJUSTMENT, req, r.share(ctx, 1), nil)
			if err == nil {
				r, _ := resp.(*nri.ValidateContainerAdjustmentResponse)
				err = r.ValidationResult(m.Info.ID.String())
			}
			if err != nil {
				return refused("plugin "+m.Info.ID.String(), err)
			}
			return nil
		})
	}
	return g.Wait()
}
