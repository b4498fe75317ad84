package hub

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// CreateContainer asks the plugins for adjustments, merges them and has the result
// validated. The answer's adjustment is nil if there is none.
func (h *Hub) CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	return h.create(ctx, req, nil)
}

// create is CreateContainer, or a rehearsal of it that leaves nothing in the hub.
func (h *Hub) create(ctx context.Context, req *nri.CreateContainerRequest, dry *rehearsal) (*nri.CreateContainerResponse, error) {
	leg := legOf(ctx)
	merge := adjust.NewCreate(req)
	if leg != nil {
		merge = adjust.ResumeCreate(req, leg.State)
	}
	r := &request{
		event: nri.Event_CREATE_CONTAINER, pod: req.GetPod(), container: req.GetContainer(), vetoable: true, dry: dry,
		message: func() proto.Message { return merge.Request() }, prepare: merge.Prepare,
		take: func(plugin plug.ID, resp proto.Message) error {
			r, _ := resp.(*nri.CreateContainerResponse)
			return merge.Apply(plugin.String(), r)
		},
	}
	consulted, err := h.dispatchGuarded(ctx, r)
	if err != nil {
		return nil, err
	}
	if leg != nil {
		leg.State = merge.State()
		return merge.Response(), nil
	}
	if err := h.validate(ctx, r, merge.Validation(consulted)); err != nil {
		return nil, err
	}
	return merge.Response(), nil
}

// validate asks the configured validator and all validating plugins, side by side. Who
// does not answer refuses.
func (h *Hub) validate(ctx context.Context, r *request, req *nri.ValidateContainerAdjustmentRequest) error {
	refused := func(who string, err error) error {
		if ctx.Err() != nil {
			return fmt.Errorf("validate the adjustment of container %q: %w", req.GetContainer().GetId(), err)
		}
		return fmt.Errorf("adjustment of container %q refused by %s: %w: %w",
			req.GetContainer().GetId(), who, err, errdefs.ErrFailedPrecondition)
	}
	if v := h.validator(); v != nil {
		if err := v.ValidateContainerAdjustment(ctx, req); err != nil {
			return refused("the default validator", err)
		}
	}
	h.mu.Lock()
	members := h.members
	h.mu.Unlock()
	g, gctx := errgroup.WithContext(ctx)
	for _, m := range members {
		if !r.hears(m, nri.Event_VALIDATE_CONTAINER_ADJUSTMENT) || !m.serves() || m.rule.Observe {
			continue
		}
		g.Go(func() error {
			failing := m.fails()
			if m.is(degraded) {
				return refused("plugin "+m.info.ID.String(), errDegraded)
			}
			t := m.queue.enter()
			defer t.leave()
			if err := t.wait(gctx, m.plugin.Done(), failing); err != nil {
				return refused("plugin "+m.info.ID.String(), err)
			}
			resp, _, err := h.call(gctx, m, nri.Event_VALIDATE_CONTAINER_ADJUSTMENT, req, r.share(ctx, 1), nil)
			if err == nil {
				r, _ := resp.(*nri.ValidateContainerAdjustmentResponse)
				err = r.ValidationResult(m.info.ID.String())
			}
			if err != nil {
				return refused("plugin "+m.info.ID.String(), err)
			}
			return nil
		})
	}
	return g.Wait()
}

// PostCreateContainer tells the plugins that a container was created.
func (h *Hub) PostCreateContainer(ctx context.Context, req *nri.PostCreateContainerRequest) error {
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_POST_CREATE_CONTAINER, pod: req.GetPod(), container: req.GetContainer(),
		message: constant(req), tolerant: true,
	})
	return err
}

// StartContainer tells the plugins that a container starts; any of them may refuse.
func (h *Hub) StartContainer(ctx context.Context, req *nri.StartContainerRequest) error {
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_START_CONTAINER, pod: req.GetPod(), container: req.GetContainer(), message: constant(req),
	})
	return err
}

// PostStartContainer tells the plugins that a container runs.
func (h *Hub) PostStartContainer(ctx context.Context, req *nri.PostStartContainerRequest) error {
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_POST_START_CONTAINER, pod: req.GetPod(), container: req.GetContainer(),
		message: constant(req), tolerant: true,
	})
	return err
}

// UpdateContainer asks the plugins about new resources of a container. The container
// itself is in the answer only if a plugin changed what was asked for.
func (h *Hub) UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	leg := legOf(ctx)
	merge := adjust.NewUpdate(req)
	if leg != nil {
		merge = adjust.ResumeUpdate(req, leg.State)
	}
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_UPDATE_CONTAINER, pod: req.GetPod(), container: req.GetContainer(), vetoable: true,
		message: func() proto.Message { return merge.Request() },
		take: func(plugin plug.ID, resp proto.Message) error {
			r, _ := resp.(*nri.UpdateContainerResponse)
			return merge.Apply(plugin.String(), r)
		},
	})
	if err != nil {
		return nil, err
	}
	if leg != nil {
		leg.State = merge.State()
	}
	return merge.Response(), nil
}

// PostUpdateContainer tells the plugins that a container's resources were changed.
func (h *Hub) PostUpdateContainer(ctx context.Context, req *nri.PostUpdateContainerRequest) error {
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_POST_UPDATE_CONTAINER, pod: req.GetPod(), container: req.GetContainer(),
		message: constant(req), tolerant: true,
	})
	return err
}

// StopContainer tells each plugin once that a container has ended. Updates in conflict
// are logged and left out: the container has ended whatever the plugins say.
func (h *Hub) StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	leg := legOf(ctx)
	others := adjust.NewOthers()
	if leg != nil {
		others = adjust.ResumeOthers(leg.State)
	}
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_STOP_CONTAINER, pod: req.GetPod(), container: req.GetContainer(),
		message: constant(req), tolerant: true,
		claim: func(_ context.Context, m *member) bool { return m.claimStop(req.GetContainer().GetId()) },
		take: func(plugin plug.ID, resp proto.Message) error {
			r, _ := resp.(*nri.StopContainerResponse)
			if err := others.Apply(plugin.String(), r.GetUpdate(), nil); err != nil {
				h.Log.WarnContext(ctx, "updates of a plugin left out", slog.String("plugin", plugin.String()), slog.Any("error", err))
			}
			return nil
		},
	})
	if err != nil {
		return nil, err
	}
	if leg != nil {
		leg.State = others.State()
	}
	return &nri.StopContainerResponse{Update: others.Updates()}, nil
}

// RemoveContainer tells each plugin once that a container is gone, and before that of
// its end if it knows the container and was not told.
func (h *Hub) RemoveContainer(ctx context.Context, req *nri.RemoveContainerRequest) error {
	id := req.GetContainer().GetId()
	late := make(map[*member]wish)
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_REMOVE_CONTAINER, pod: req.GetPod(), container: req.GetContainer(),
		message: constant(req), tolerant: true,
		implied: nri.Event_STOP_CONTAINER,
		claim: func(ctx context.Context, m *member) bool {
			if m.stageOf(id) == known && m.claimStop(id) {
				stop := &nri.StopContainerRequest{Pod: req.GetPod(), Container: req.GetContainer()}
				if r, ok := h.stopFirst(ctx, m, nri.Event_STOP_CONTAINER, stop).(*nri.StopContainerResponse); ok {
					late[m] = wish{updates: r.GetUpdate()}
				}
			}
			return m.claimRemoval(id)
		},
	})
	// Only now, because the gateway must not be called while a plugin's turn is held.
	for m, w := range late {
		h.carryOut(ctx, m, w)
	}
	return err
}

// stopFirst tells a plugin of a stop that it was never told of, while the request holds
// the plugin's turn.
func (h *Hub) stopFirst(ctx context.Context, m *member, e nri.Event, req proto.Message) proto.Message {
	resp, _, err := h.call(ctx, m, e, req, 0, nil)
	if err != nil {
		h.Log.WarnContext(ctx, "plugin failed the stop before a removal",
			slog.String("plugin", m.info.ID.String()), slog.Any("error", err))
		return nil
	}
	return resp
}
