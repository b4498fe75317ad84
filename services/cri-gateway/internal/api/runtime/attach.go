package runtime

import (
	"context"

	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// Attach implements criv1.RuntimeServiceServer. It attaches when a client opens the URL.
func (s *Service) Attach(ctx context.Context, req *criv1.AttachRequest) (*criv1.AttachResponse, error) {
	if err := validate.Attach(req); err != nil {
		return nil, err
	}
	container, err := s.running(ctx, req.GetContainerId())
	if err != nil {
		return nil, err
	}
	full := proto.CloneOf(req)
	full.ContainerId = container.GetStatus().GetId()
	url, err := s.streams.AttachURL(full, container.GetTty(), container.GetStdin())
	if err != nil {
		return nil, err
	}
	return &criv1.AttachResponse{Url: url}, nil
}
