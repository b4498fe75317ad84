package image

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
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
	_, err = s.pulls.do(ctx, "unpack "+name+" "+e.id, func(ctx context.Context) (string, error) {
		ctx, span := s.tracer.Start(ctx, "sandboxd.image.unpack", trace.WithAttributes(attribute.String("image", e.id)))
		defer span.End()
		return e.id, s.unpackLocal(s.st.Context(ctx), e, name)
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
	return e.id
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
	path, err := registry.Tree(ctx, record.Target, platforms.Default(), localDocument(s.st.Content()))
	if err != nil {
		return err
	}
	how := unpacking{
		name: nameOf(e), snapshotter: snapshotter, extract: s.extractor(func(digest.Digest) {}),
		bring: func(ctx context.Context, desc ocispec.Descriptor) error {
			if !s.st.BlobPresent(ctx, desc) {
				return fmt.Errorf("blob %s is not on the node, pull the image for this runtime handler: %w", desc.Digest, errdefs.ErrNotFound)
			}
			return nil
		},
	}
	if err := s.unpack(ctx, path[len(path)-1], how); err != nil {
		return registry.Classify(err)
	}
	if err := s.mend(ctx, e.contents, how); err != nil {
		return err
	}
	return registry.Classify(s.st.Sync(snapshotter))
}
