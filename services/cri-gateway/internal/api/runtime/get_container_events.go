package runtime

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// GetContainerEvents implements criv1.RuntimeServiceServer. The header of the answer is
// sent once the caller gets all events from then on.
func (s *Service) GetContainerEvents(
	_ *criv1.GetEventsRequest, stream grpc.ServerStreamingServer[criv1.ContainerEventResponse],
) error {
	ctx := stream.Context()
	follower, err := s.events.Follow(ctx)
	if err != nil {
		return err
	}
	defer follower.Close()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	return follower.Copy(ctx, stream.Send)
}
