package api

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
)

// Images is what the image handlers need of the image service.
type Images interface {
	Pull(ctx context.Context, spec *criv1.ImageSpec, auth *criv1.AuthConfig, sandbox *criv1.PodSandboxConfig) (imageID string, err error)
	List(ctx context.Context, filter *criv1.ImageFilter) ([]*criv1.Image, error)
	Status(ctx context.Context, spec *criv1.ImageSpec, verbose bool) (*criv1.Image, map[string]string, error)
	Remove(ctx context.Context, spec *criv1.ImageSpec) error
	Usage(ctx context.Context) (images, containers []*criv1.FilesystemUsage, err error)
}

// Image serves crisp.image.v1.ImageService.
type Image struct {
	imagev1.UnsafeImageServiceServer

	images Images
	work   *Work
}

// NewImage returns the service.
func NewImage(images Images, work *Work) *Image { return &Image{images: images, work: work} }

// PullImage implements ImageService. The image service itself decides what a pull does
// whose caller goes away, since others may wait for it too.
func (i *Image) PullImage(ctx context.Context, req *imagev1.PullImageRequest) (*imagev1.PullImageResponse, error) {
	err := required("image.image", req.GetImage().GetImage() != "")
	if err != nil {
		return nil, err
	}
	id, err := i.images.Pull(ctx, req.GetImage(), req.GetAuth(), req.GetSandboxConfig())
	if err != nil {
		return nil, err
	}
	return &imagev1.PullImageResponse{ImageRef: id}, nil
}

// ListImages implements ImageService.
func (i *Image) ListImages(ctx context.Context, req *imagev1.ListImagesRequest) (*imagev1.ListImagesResponse, error) {
	list, err := i.images.List(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &imagev1.ListImagesResponse{Images: list}, nil
}

// GetImage implements ImageService.
func (i *Image) GetImage(ctx context.Context, req *imagev1.GetImageRequest) (*imagev1.GetImageResponse, error) {
	err := required("image.image", req.GetImage().GetImage() != "")
	if err != nil {
		return nil, err
	}
	img, info, err := i.images.Status(ctx, req.GetImage(), req.GetVerbose())
	if err != nil {
		return nil, err
	}
	return &imagev1.GetImageResponse{Image: img, Info: info}, nil
}

// RemoveImage implements ImageService.
func (i *Image) RemoveImage(ctx context.Context, req *imagev1.RemoveImageRequest) (*imagev1.RemoveImageResponse, error) {
	err := required("image.image", req.GetImage().GetImage() != "")
	if err != nil {
		return nil, err
	}
	err = detachErr(ctx, i.work, func(ctx context.Context) error { return i.images.Remove(ctx, req.GetImage()) })
	if err != nil {
		return nil, err
	}
	return &imagev1.RemoveImageResponse{}, nil
}

// GetImageFilesystem implements ImageService.
func (i *Image) GetImageFilesystem(ctx context.Context, _ *imagev1.GetImageFilesystemRequest) (*imagev1.GetImageFilesystemResponse, error) {
	images, containers, err := i.images.Usage(ctx)
	if err != nil {
		return nil, err
	}
	return &imagev1.GetImageFilesystemResponse{ImageFilesystems: images, ContainerFilesystems: containers}, nil
}
