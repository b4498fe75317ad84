package runtime

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// PortForward implements criv1.RuntimeServiceServer. It connects when a client opens the URL.
func (s *Service) PortForward(ctx context.Context, req *criv1.PortForwardRequest) (*criv1.PortForwardResponse, error) {
	if err := validate.PortForward(req); err != nil {
		return nil, err
	}
	id := req.GetPodSandboxId()
	sandbox, err := s.sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{SandboxId: id})
	if err != nil {
		return nil, err
	}
	if state := sandbox.GetStatus().GetState(); state != criv1.PodSandboxState_SANDBOX_READY {
		return nil, fmt.Errorf("sandbox %s is not ready but in state %s: %w", id, state, errdefs.ErrFailedPrecondition)
	}
	full := proto.CloneOf(req)
	full.PodSandboxId = sandbox.GetStatus().GetId()
	url, err := s.streams.PortForwardURL(full)
	if err != nil {
		return nil, err
	}
	return &criv1.PortForwardResponse{Url: url}, nil
}
