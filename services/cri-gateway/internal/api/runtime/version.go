package runtime

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/status"
)

// Version implements criv1.RuntimeServiceServer. It needs no backend.
func (s *Service) Version(context.Context, *criv1.VersionRequest) (*criv1.VersionResponse, error) {
	return status.Version(s.version), nil
}
