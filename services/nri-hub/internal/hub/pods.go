package hub

import (
	"context"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

func constant(m proto.Message) func() proto.Message {
	return func() proto.Message { return m }
}

// RunPodSandbox tells the plugins of a pod; any of them may refuse it.
func (h *Hub) RunPodSandbox(ctx context.Context, req *nri.RunPodSandboxRequest) error {
	_, err := h.dispatchGuarded(ctx, &request{
		event: nri.Event_RUN_POD_SANDBOX, pod: req.GetPod(), message: constant(req), vetoable: true,
	})
	return err
}

// UpdatePodSandbox tells the plugins of resources that a pod is about to get.
func (h *Hub) UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) error {
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_UPDATE_POD_SANDBOX, pod: req.GetPod(), message: constant(req), vetoable: true,
	})
	return err
}

// PostUpdatePodSandbox tells the plugins of resources that a pod has got.
func (h *Hub) PostUpdatePodSandbox(ctx context.Context, req *nri.PostUpdatePodSandboxRequest) error {
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_POST_UPDATE_POD_SANDBOX, pod: req.GetPod(), message: constant(req), tolerant: true,
	})
	return err
}

// StopPodSandbox tells each plugin once that a pod stops.
func (h *Hub) StopPodSandbox(ctx context.Context, req *nri.StopPodSandboxRequest) error {
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_STOP_POD_SANDBOX, pod: req.GetPod(), message: constant(req), tolerant: true,
		claim: func(_ context.Context, m *member) bool { return m.claimStop(req.GetPod().GetId()) },
	})
	return err
}

// RemovePodSandbox tells each plugin once that a pod is gone, and before that of its
// stop if it knows the pod and was not told.
func (h *Hub) RemovePodSandbox(ctx context.Context, req *nri.RemovePodSandboxRequest) error {
	id := req.GetPod().GetId()
	_, err := h.dispatch(ctx, &request{
		event: nri.Event_REMOVE_POD_SANDBOX, pod: req.GetPod(), message: constant(req), tolerant: true,
		implied: nri.Event_STOP_POD_SANDBOX,
		claim: func(ctx context.Context, m *member) bool {
			if m.stageOf(id) == known && m.claimStop(id) {
				h.stopFirst(ctx, m, nri.Event_STOP_POD_SANDBOX, &nri.StopPodSandboxRequest{Pod: req.GetPod()})
			}
			return m.claimRemoval(id)
		},
	})
	return err
}
