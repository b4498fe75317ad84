package image

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Unpack makes sure that a snapshotter (empty for the default one) has the layers of a
// resolved image, and returns the image as it is there. What is missing is extracted from
// the blobs on the node; nothing is fetched. Identical calls at the same time are one.
// Errors: ErrNotFound if the image is gone or a blob of it is missing, which a pull mends.
func (s *Service) Unpack(ctx context.Context, img pod.Image, snapshotter string) (pod.Image, error) {
	_, name, err := s.st.Snapshotter(snapshotter)
	if err != nil {
		return pod.Image{}, fmt.Errorf("image %q: %w", img.ID, err)
	}
	if img.Snapshotter == name {
		return img, nil
	}
	e, err := s.lookup(img.ID)
	if err != nil {
		return pod.Image{}, err
	}
	if e == nil {
		return pod.Image{}, fmt.Errorf("image %q: %w", img.ID, errdefs.ErrNotFound)
	}
	img.Snapshotter = name
	if s.check(ctx, e, name) == nil {
		return img, nil
	}
	_, err = s.pulls.do(ctx, "unpack "+name+" "+e.ID, func(ctx context.Context) (string, error) {
		ctx, span := s.tracer.Start(ctx, "sandboxd.image.unpack", trace.WithAttributes(attribute.String("image", e.ID)))
		defer span.End()
		return e.ID, s.unpackLocal(s.st.Context(ctx), e, name)
	})
	if err != nil {
		return pod.Image{}, fmt.Errorf("unpack image %q into %s: %w", img.ID, name, err)
	}
	return img, nil
}

// nameOf is a name by which the registry knows an image.
func nameOf(e *entry) string {
	if tags := e.shown.GetRepoTags(); len(tags) > 0 {
		return tags[0]
	}
	if digests := e.shown.GetRepoDigests(); len(digests) > 0 {
		return digests[0]
	}
	return e.ID
}

// unpackLocal extracts an image from what the node has of it.
func (s *Service) unpackLocal(ctx context.Context, e *entry, snapshotter string) (err error) {
	base := ctx
	ctx, held, err := s.st.Lease(ctx, "")
	if err != nil {
		return err
	}
	defer func() { s.settle(base, held, err) }()
	record, err := s.st.Images().Get(ctx, e.names[0])
	if err != nil {
		return err
	}
	if err := s.assembler.UnpackLocal(ctx, record.Target, e.Contents, nameOf(e), snapshotter, s.conf.Load().assembly()); err != nil {
		return err
	}
	return registry.Classify(s.st.Sync(snapshotter))
}
