package image

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	eventstypes "github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Remove removes an image with all its names and returns when its space is free. An unknown
// image is not an error. Errors: ErrInvalidArgument, ErrFailedPrecondition while containers
// use the image.
func (s *Service) Remove(ctx context.Context, spec *criv1.ImageSpec) error {
	ctx = s.st.Context(ctx)
	c, err := s.current()
	if err != nil {
		return err
	}
	q, err := parseQuery(spec.GetImage())
	if err != nil {
		return err
	}
	var names []string
	if e := c.find(q); e != nil {
		if users := s.inUse(ctx, e.ID); len(users) > 0 {
			return fmt.Errorf("image %q is used by containers %s: %w", spec.GetImage(), strings.Join(users, ", "), errdefs.ErrFailedPrecondition)
		}
		names = e.names
	} else if names, err = s.unreadable(ctx, q); err != nil || len(names) == 0 {
		return err
	}
	if err := s.forget(ctx, names); err != nil {
		return fmt.Errorf("image %q: %w", spec.GetImage(), err)
	}
	if err := s.reload(ctx); err != nil {
		return err
	}
	// Who removes images needs space.
	if err := s.st.DropKept(ctx); err != nil {
		s.log.WarnContext(ctx, "what failed pulls have brought is not given up", slog.Any("error", err))
	}
	if err := s.st.Collect(ctx); err != nil {
		// The image is gone. Its space comes back with a later collection.
		s.log.WarnContext(ctx, "space of a removed image not free yet", slog.String("image", spec.GetImage()), slog.Any("error", err))
	}
	return nil
}

// unreadable finds the names of an image that the catalog could not read.
func (s *Service) unreadable(ctx context.Context, q query) ([]string, error) {
	name := q.name
	if q.digest != "" {
		name = q.digest // of an id
	}
	img, err := s.st.Images().Get(ctx, name)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("image %q: %w", name, err)
	}
	all, err := s.st.Images().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	var names []string
	for _, other := range all {
		if other.Target.Digest == img.Target.Digest {
			names = append(names, other.Name)
		}
	}
	return names, nil
}

// forget removes names in one transaction.
func (s *Service) forget(ctx context.Context, names []string) error {
	var gone []string
	err := s.st.Update(ctx, func(ctx context.Context) error {
		gone = gone[:0]
		for _, n := range names {
			err := s.st.Images().Delete(ctx, n)
			if errdefs.IsNotFound(err) {
				continue
			}
			if err != nil {
				return err
			}
			gone = append(gone, n)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, n := range gone {
		s.tell(ctx, "/images/delete", &eventstypes.ImageDelete{Name: n})
	}
	return nil
}

func (s *Service) tell(ctx context.Context, topic string, event any) {
	if s.conf.Load().OnChange != nil {
		s.conf.Load().OnChange(ctx, topic, event)
	}
}
