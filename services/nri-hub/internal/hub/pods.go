package hub

import (
	"context"
	"log/slog"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
)

func constant(m proto.Message) func() proto.Message {
	return func() proto.Message { return m }
}

// RunPodSandbox tells the plugins of a pod; any of them may refuse it.
func (h *Hub) RunPodSandbox(ctx context.Context, req *nri.RunPodSandboxRequest) error {
	_, err := h.dispatcher.SendGuarded(ctx, &dispatch.Request{
		Event: nri.Event_RUN_POD_SANDBOX, Pod: req.GetPod(), Message: constant(req), Vetoable: true,
	})
	return err
}

// UpdatePodSandbox tells the plugins of resources that a pod is about to get.
func (h *Hub) UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) error {
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_UPDATE_POD_SANDBOX, Pod: req.GetPod(), Message: constant(req), Vetoable: true,
	})
	return err
}

// PostUpdatePodSandbox tells the plugins of resources that a pod has got.
func (h *Hub) PostUpdatePodSandbox(ctx context.Context, req *nri.PostUpdatePodSandboxRequest) error {
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_POST_UPDATE_POD_SANDBOX, Pod: req.GetPod(), Message: constant(req), Tolerant: true,
	})
	return err
}

// StopPodSandbox tells each plugin once that a pod stops.
func (h *Hub) StopPodSandbox(ctx context.Context, req *nri.StopPodSandboxRequest) error {
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_STOP_POD_SANDBOX, Pod: req.GetPod(), Message: constant(req), Tolerant: true,
		Claim: func(_ context.Context, m *member.Member) bool { return m.ClaimStop(req.GetPod().GetId()) },
	})
	return err
}

// RemovePodSandbox tells each plugin once that a pod is gone, and before that of its
// stop if it knows the pod and was not told.
func (h *Hub) RemovePodSandbox(ctx context.Context, req *nri.RemovePodSandboxRequest) error {
	id := req.GetPod().GetId()
	_, err := h.dispatcher.Send(ctx, &dispatch.Request{
		Event: nri.Event_REMOVE_POD_SANDBOX, Pod: req.GetPod(), Message: constant(req), Tolerant: true,
		Implied: nri.Event_STOP_POD_SANDBOX,
		Claim: func(ctx context.Context, m *member.Member) bool {
			if m.StageOf(id) == object.Known && m.ClaimStop(id) {
				h.stopFirst(ctx, m, nri.Event_STOP_POD_SANDBOX, &nri.StopPodSandboxRequest{Pod: req.GetPod()})
			}
			return m.ClaimRemoval(id)
		},
	})
	return err
}

// stopFirst tells a plugin of a stop that it was never told of, while the request holds
// the plugin's turn.
func (h *Hub) stopFirst(ctx context.Context, m *member.Member, e nri.Event, req proto.Message) proto.Message {
	resp, _, err := h.caller.Call(ctx, m, e, req, 0, nil)
	if err != nil {
		h.log.WarnContext(ctx, "plugin failed the stop before a removal",
			slog.String("plugin", m.Info.ID.String()), slog.Any("error", err))
		return nil
	}
	return resp
}
