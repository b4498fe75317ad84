// Package image implements the CRI ImageService by passing checked requests on to
// sandboxd. It keeps nothing, and never logs credentials. Handlers may be called
// concurrently.
package image

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/relay"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// Service is the ImageService.
type Service struct {
	criv1.UnimplementedImageServiceServer

	images imagev1.ImageServiceClient
}

// New returns a service on top of sandboxd's images.
func New(images imagev1.ImageServiceClient) *Service { return &Service{images: images} }

// PullImage implements criv1.ImageServiceServer.
func (s *Service) PullImage(ctx context.Context, req *criv1.PullImageRequest) (*criv1.PullImageResponse, error) {
	if err := validate.PullImage(req); err != nil {
		return nil, err
	}
	resp, err := s.images.PullImage(ctx, &imagev1.PullImageRequest{
		Image: req.GetImage(), Auth: req.GetAuth(), SandboxConfig: req.GetSandboxConfig(),
	})
	if err != nil {
		return nil, reasoned(err)
	}
	return &criv1.PullImageResponse{ImageRef: resp.GetImageRef()}, nil
}

// reasoned makes kubelet see the reason of a failed pull: it looks for it at the beginning of
// errors, and cuts off what gRPC puts before their text only if they have no code. Other
// errors stay as they are.
func reasoned(err error) error {
	text := status.Convert(err).Message()
	for _, reason := range []error{crierrors.ErrRegistryUnavailable, crierrors.ErrSignatureValidationFailed} {
		if strings.HasPrefix(text, reason.Error()) {
			return status.Error(codes.Unknown, text)
		}
	}
	return err
}

// ListImages implements criv1.ImageServiceServer.
func (s *Service) ListImages(ctx context.Context, req *criv1.ListImagesRequest) (*criv1.ListImagesResponse, error) {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return nil, err
	}
	resp, err := s.images.ListImages(ctx, &imagev1.ListImagesRequest{Filter: req.GetFilter()})
	if err != nil {
		return nil, err
	}
	return &criv1.ListImagesResponse{Images: resp.GetImages()}, nil
}

// StreamImages implements criv1.ImageServiceServer.
func (s *Service) StreamImages(
	req *criv1.StreamImagesRequest, stream grpc.ServerStreamingServer[criv1.StreamImagesResponse],
) error {
	if err := validate.Filter(req.GetFilter()); err != nil {
		return err
	}
	source, err := s.images.StreamImages(stream.Context(), &imagev1.StreamImagesRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return relay.Copy(source, (*imagev1.StreamImagesResponse).GetImages, func(part []*criv1.Image) error {
		return stream.Send(&criv1.StreamImagesResponse{Images: part})
	})
}

// ImageStatus implements criv1.ImageServiceServer. An unknown image is an answer without
// an image.
func (s *Service) ImageStatus(ctx context.Context, req *criv1.ImageStatusRequest) (*criv1.ImageStatusResponse, error) {
	if err := validate.Image("image", req.GetImage()); err != nil {
		return nil, err
	}
	resp, err := s.images.GetImage(ctx, &imagev1.GetImageRequest{Image: req.GetImage(), Verbose: req.GetVerbose()})
	if err != nil {
		return nil, err
	}
	return &criv1.ImageStatusResponse{Image: resp.GetImage(), Info: resp.GetInfo()}, nil
}

// RemoveImage implements criv1.ImageServiceServer. An unknown image is no error.
func (s *Service) RemoveImage(ctx context.Context, req *criv1.RemoveImageRequest) (*criv1.RemoveImageResponse, error) {
	if err := validate.Image("image", req.GetImage()); err != nil {
		return nil, err
	}
	if _, err := s.images.RemoveImage(ctx, &imagev1.RemoveImageRequest{Image: req.GetImage()}); err != nil {
		return nil, err
	}
	return &criv1.RemoveImageResponse{}, nil
}

// ImageFsInfo implements criv1.ImageServiceServer.
func (s *Service) ImageFsInfo(ctx context.Context, _ *criv1.ImageFsInfoRequest) (*criv1.ImageFsInfoResponse, error) {
	resp, err := s.images.GetImageFilesystem(ctx, &imagev1.GetImageFilesystemRequest{})
	if err != nil {
		return nil, err
	}
	return &criv1.ImageFsInfoResponse{
		ImageFilesystems:     resp.GetImageFilesystems(),
		ContainerFilesystems: resp.GetContainerFilesystems(),
	}, nil
}
