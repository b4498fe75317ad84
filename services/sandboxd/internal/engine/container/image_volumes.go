package container

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// imageMount is an image that is mounted for a container.
type imageMount struct {
	imageID string
	path    string // on the node
}

// mountImages mounts the images that a container wants as volumes and returns them by
// container path. After an error some may be mounted; undoing the container releases them.
func (u *UseCases) mountImages(ctx context.Context, c *table.Container, cfg *criv1.ContainerConfig) (map[string]imageMount, error) {
	out := map[string]imageMount{}
	for i, m := range cfg.GetMounts() {
		if m.GetImage() == nil {
			if m.GetImageSubPath() != "" {
				return nil, fmt.Errorf("config.mounts[%d].image_sub_path without an image: %w", i, errdefs.ErrInvalidArgument)
			}
			continue
		}
		mounted, err := u.mountImage(ctx, c, m)
		if err != nil {
			// kubelet shows the reason at the beginning of the text.
			return nil, fmt.Errorf("%w: config.mounts[%d]: %w", crierrors.ErrImageVolumeMountFailed, i, err)
		}
		out[m.GetContainerPath()] = mounted
	}
	return out, nil
}

func (u *UseCases) mountImage(ctx context.Context, c *table.Container, m *criv1.Mount) (imageMount, error) {
	switch {
	case m.GetImage().GetImage() == "":
		return imageMount{}, fmt.Errorf("image.image is empty: %w", errdefs.ErrInvalidArgument)
	case m.GetHostPath() != "":
		return imageMount{}, fmt.Errorf("host_path together with an image: %w", errdefs.ErrInvalidArgument)
	case !m.GetReadonly():
		return imageMount{}, fmt.Errorf("readonly must be set for an image: %w", errdefs.ErrInvalidArgument)
	}
	img, err := u.p.Images.Resolve(ctx, m.GetImage().GetImage())
	if err != nil {
		return imageMount{}, err
	}
	img, err = u.p.Images.Unpack(ctx, img, c.Sandbox.Handler.Snapshotter)
	if err != nil {
		return imageMount{}, err
	}
	ids := pod.IDMap{UIDs: m.GetUidMappings(), GIDs: m.GetGidMappings()}
	path, err := u.p.ImageVolumes.Mount(ctx, c.Sandbox.ID, c.ID, img, ids, m.GetImageSubPath())
	if err != nil {
		return imageMount{}, err
	}
	return imageMount{imageID: img.ID, path: path}, nil
}

// noteImages writes into a container's configuration which images its volumes are.
func noteImages(cfg *criv1.ContainerConfig, mounted map[string]imageMount) {
	for _, m := range cfg.GetMounts() {
		if v, ok := mounted[m.GetContainerPath()]; ok && m.GetImage() != nil {
			m.Image.ImageRef = v.imageID
		}
	}
}

// sameContainer compares a recorded configuration with a requested one. Which images the
// volumes are is an answer and no part of a request.
func sameContainer(held, asked *criv1.ContainerConfig) bool {
	held, asked = proto.CloneOf(held), proto.CloneOf(asked)
	for _, cfg := range []*criv1.ContainerConfig{held, asked} {
		for _, m := range cfg.GetMounts() {
			if m.GetImage() != nil {
				m.Image.ImageRef = ""
			}
		}
	}
	return proto.Equal(held, asked)
}
