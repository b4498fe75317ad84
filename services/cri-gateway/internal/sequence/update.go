package sequence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
	"github.com/crisp-cri/crisp/services/internal/pause"
)

// evictionPatience is how many seconds an evicted container has between the stop signal
// and the kill. It is short because somebody waits for its resources.
const evictionPatience = 10

// UpdateContainerResources changes the resources of a container, as kubelet asks and the
// plugins amend.
func (s *Sequences) UpdateContainerResources(ctx context.Context, req *criv1.UpdateContainerResourcesRequest) error {
	spec := s.spec("update_container", "", nil)
	_, err := operation.Do(ctx, s.ops, spec, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.updateContainer(ctx, req)
	})
	return err
}

func (s *Sequences) updateContainer(ctx context.Context, req *criv1.UpdateContainerResourcesRequest) error {
	id := req.GetContainerId()
	amended, err := s.askUpdate(ctx, req)
	if err != nil {
		return err
	}
	updated, err := s.containers.UpdateContainerResources(ctx, &containerv1.UpdateContainerResourcesRequest{
		ContainerId: id,
		Linux:       req.GetLinux(),
		Nri:         amended,
		Annotations: req.GetAnnotations(),
	})
	if err != nil {
		return fmt.Errorf("update container %s: %w", id, err)
	}
	s.tell(ctx, nri.Event_POST_UPDATE_CONTAINER, updated.GetPod(), updated.GetContainer())
	return nil
}

// askUpdate asks the plugins about an update and returns what they make of it, nil if
// they leave it alone.
func (s *Sequences) askUpdate(ctx context.Context, req *criv1.UpdateContainerResourcesRequest) (*nri.LinuxResources, error) {
	id := req.GetContainerId()
	wants, err := s.hub.Wants(ctx, nri.Event_UPDATE_CONTAINER)
	if err != nil {
		return nil, fmt.Errorf("container %s: plugins: %w", id, err)
	}
	if !wants {
		return nil, nil
	}
	before, err := s.describe(ctx, id)
	if err != nil {
		return nil, err
	}
	resp, err := s.hub.UpdateContainer(ctx, &nri.UpdateContainerRequest{
		Pod:            before.GetPod(),
		Container:      before.GetContainer(),
		LinuxResources: nriResources(req.GetLinux()),
	})
	if err != nil {
		return nil, fmt.Errorf("container %s: plugins: %w", id, err)
	}
	s.evict(ctx, resp.GetEvict())
	if err := s.updateOthers(ctx, id, resp.GetUpdate()); err != nil {
		return nil, err
	}
	for _, u := range resp.GetUpdate() {
		if u.GetContainerId() == id {
			return u.GetLinux().GetResources(), nil
		}
	}
	return nil, nil
}

// ApplyUpdates does what a plugin asks for by itself and returns the updates that failed.
// A failure that the plugin asked to ignore is not among them. Evictions are carried out after
// the answer, which says nothing of them: a plugin that asks in the middle of a request could
// not be told of the ends else.
func (s *Sequences) ApplyUpdates(
	ctx context.Context, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction,
) ([]*nri.ContainerUpdate, error) {
	if len(evictions) > 0 {
		go s.evictAside(context.WithoutCancel(ctx), evictions)
	}
	spec := s.spec("plugin_update", "", nil)
	return operation.Do(ctx, s.ops, spec, func(ctx context.Context) ([]*nri.ContainerUpdate, error) {
		var failed []*nri.ContainerUpdate
		for _, u := range updates {
			// Nothing is waited for: a plugin that asks in the middle of a request may be whom the
			// container in question waits for.
			if err := s.updateOther(ctx, u, 0); err != nil {
				failed = append(failed, u)
				s.log.WarnContext(ctx, "container not updated as a plugin wanted",
					slog.String("container_id", u.GetContainerId()), slog.Any("error", err))
			}
		}
		return failed, nil
	})
}

// evictAside is evict as an operation that nobody waits for; it ends with the operations.
func (s *Sequences) evictAside(ctx context.Context, evictions []*nri.ContainerEviction) {
	_, err := operation.Do(ctx, s.ops, s.spec("plugin_eviction", "", nil), func(ctx context.Context) (struct{}, error) {
		s.evict(ctx, evictions)
		return struct{}{}, nil
	})
	if err != nil {
		s.log.WarnContext(ctx, "containers not evicted", slog.Any("error", err))
	}
}

// updateOthers performs the updates that plugins want of containers other than self. All
// are tried; the error joins the failures that are not to be ignored.
func (s *Sequences) updateOthers(ctx context.Context, self string, updates []*nri.ContainerUpdate) error {
	var errs []error
	for _, u := range updates {
		// The plugins' answers may hold empty entries.
		if u.GetContainerId() == "" || u.GetContainerId() == self {
			continue
		}
		err := s.updateOther(ctx, u, makingMost)
		if errdefs.IsNotFound(err) {
			// Its plugin cannot always know, and there is nothing left to update.
			s.log.DebugContext(ctx, "container not updated as a plugin wanted", slog.String("container_id", u.GetContainerId()), slog.Any("error", err))
			continue
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// updateOther performs one update, with pauses of at most so long in which a container is waited
// for that another operation is making. Of one that has ended or is gone the error is NotFound.
func (s *Sequences) updateOther(ctx context.Context, u *nri.ContainerUpdate, most time.Duration) error {
	if u.GetLinux().GetResources() == nil {
		return nil
	}
	id := u.GetContainerId()
	err := s.updateMade(ctx, id, u.GetLinux().GetResources(), most)
	switch {
	case err == nil:
		return nil
	case u.GetIgnoreFailure():
		s.log.DebugContext(ctx, "failed update ignored", slog.String("container_id", id), slog.Any("error", err))
		return nil
	default:
		return fmt.Errorf("update container %s: %w", id, err)
	}
}

func (s *Sequences) updateMade(ctx context.Context, id string, resources *nri.LinuxResources, most time.Duration) error {
	for rest := makingFirst; ; rest *= 2 {
		_, err := s.containers.UpdateContainerResources(ctx, &containerv1.UpdateContainerResourcesRequest{ContainerId: id, Nri: resources})
		if !errdefs.IsFailedPrecondition(err) {
			return err
		}
		c, describeErr := s.describe(ctx, id)
		switch state := c.GetContainer().GetState(); {
		case errdefs.IsNotFound(describeErr):
			return describeErr
		case describeErr == nil && state == nri.ContainerState_CONTAINER_STOPPED:
			return fmt.Errorf("it has ended: %w", errdefs.ErrNotFound)
		case describeErr != nil, state != nri.ContainerState_CONTAINER_UNKNOWN, rest > most, !pause.For(ctx, rest):
			return err
		}
	}
}

// Pauses between looks at whether a container that is to be updated has been made.
const (
	makingFirst = 20 * time.Millisecond
	makingMost  = time.Second
)

// evict stops the containers that plugins want gone, side by side, and returns when they have
// ended or could not be stopped.
func (s *Sequences) evict(ctx context.Context, evictions []*nri.ContainerEviction) {
	var all sync.WaitGroup
	for _, e := range evictions {
		if e.GetContainerId() == "" {
			continue
		}
		all.Go(func() {
			s.log.InfoContext(ctx, "container evicted by a plugin",
				slog.String("container_id", e.GetContainerId()), slog.String("reason", e.GetReason()))
			if err := s.stopContainer(ctx, e.GetContainerId(), evictionPatience); err != nil {
				s.log.WarnContext(ctx, "container not evicted", slog.String("container_id", e.GetContainerId()),
					slog.Any("error", err))
			}
		})
	}
	all.Wait()
}

// receiver is the receiving side of a stream.
type receiver[T any] interface{ Recv() (T, error) }

// eachPiece calls do for every message until the stream ends or do returns false.
func eachPiece[T any](stream receiver[T], do func(T) bool) error {
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if !do(piece) {
			return nil
		}
	}
}
