package hub

import (
	"context"
	"log/slog"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// CreateContainer asks the plugins for adjustments, merges them and has the result
// validated. The answer's adjustment is nil if there is none.
func (h *Hub) CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	return h.create(ctx, req, nil)
}

// create is CreateContainer, or a rehearsal of it that leaves nothing in the hub.
func (h *Hub) create(ctx context.Context, req *nri.CreateContainerRequest, dry *dispatch.Rehearsal) (*nri.CreateContainerResponse, error) {
	leg := dispatch.LegOf(ctx)
	merge := adjust.NewCreate(req)
	if leg != nil {
		merge = adjust.ResumeCreate(req, leg.State)
	}
	r := &dispatch.Request{
		Event: nri.Event_CREATE_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(), Vetoable: true, Dry: dry,
		Message: func() proto.Message { return merge.Request() }, Prepare: merge.Prepare,
		Take: func(plugin plug.ID, resp proto.Message) error {
			r, _ := resp.(*nri.CreateContainerResponse)
			return merge.Apply(plugin.String(), r)
		},
	}
	consulted, err := h.dispatcher.SendGuarded(ctx, r)
	if err != nil {
		return nil, err
	}
	if leg != nil {
		leg.State = merge.State()
		return merge.Response(), nil
	}
	if err := h.dispatcher.Validate(ctx, r, merge.Validation(consulted)); err != nil {
		return nil, err
	}
	return merge.Response(), nil
}

// PostCreateContainer tells the plugins that a container was created.
func (h *Hub) PostCreateContainer(ctx context.Context, req *nri.PostCreateContainerRequest) error {
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_POST_CREATE_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(),
		Message: constant(req), Tolerant: true,
	})
	return err
}

// StartContainer tells the plugins that a container starts; any of them may refuse.
func (h *Hub) StartContainer(ctx context.Context, req *nri.StartContainerRequest) error {
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_START_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(), Message: constant(req),
	})
	return err
}

// PostStartContainer tells the plugins that a container runs.
func (h *Hub) PostStartContainer(ctx context.Context, req *nri.PostStartContainerRequest) error {
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_POST_START_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(),
		Message: constant(req), Tolerant: true,
	})
	return err
}

// UpdateContainer asks the plugins about new resources of a container. The container
// itself is in the answer only if a plugin changed what was asked for.
func (h *Hub) UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	leg := dispatch.LegOf(ctx)
	merge := adjust.NewUpdate(req)
	if leg != nil {
		merge = adjust.ResumeUpdate(req, leg.State)
	}
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_UPDATE_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(), Vetoable: true,
		Message: func() proto.Message { return merge.Request() },
		Take: func(plugin plug.ID, resp proto.Message) error {
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
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_POST_UPDATE_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(),
		Message: constant(req), Tolerant: true,
	})
	return err
}

// StopContainer tells each plugin once that a container has ended. Updates in conflict
// are logged and left out: the container has ended whatever the plugins say.
func (h *Hub) StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	leg := dispatch.LegOf(ctx)
	others := adjust.NewOthers()
	if leg != nil {
		others = adjust.ResumeOthers(leg.State)
	}
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_STOP_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(),
		Message: constant(req), Tolerant: true,
		Claim: func(_ context.Context, m *member.Member) bool { return m.ClaimStop(req.GetContainer().GetId()) },
		Take: func(plugin plug.ID, resp proto.Message) error {
			r, _ := resp.(*nri.StopContainerResponse)
			if err := others.Apply(plugin.String(), r.GetUpdate(), nil); err != nil {
				h.log.WarnContext(ctx, "updates of a plugin left out", slog.String("plugin", plugin.String()), slog.Any("error", err))
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
	late := make(map[*member.Member]member.Wish)
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_REMOVE_CONTAINER, Pod: req.GetPod(), Container: req.GetContainer(),
		Message: constant(req), Tolerant: true,
		Implied: nri.Event_STOP_CONTAINER,
		Claim: func(ctx context.Context, m *member.Member) bool {
			if m.StageOf(id) == object.Known && m.ClaimStop(id) {
				stop := &nri.StopContainerRequest{Pod: req.GetPod(), Container: req.GetContainer()}
				if r, ok := h.stopFirst(ctx, m, nri.Event_STOP_CONTAINER, stop).(*nri.StopContainerResponse); ok {
					late[m] = member.Wish{Updates: r.GetUpdate()}
				}
			}
			return m.ClaimRemoval(id)
		},
	})
	// Only now, because the gateway must not be called while a plugin's turn is held.
	for m, w := range late {
		h.outward.CarryOut(ctx, m, w)
	}
	return err
}
