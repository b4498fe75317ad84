package containerevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/internal/pause"
)

const (
	// patience is how long sandboxd may be away before the followers are told to list.
	patience = 30 * time.Second
	// settling is how long a state may lag behind the event that tells of it. sandboxd
	// shows a change right after it is durable, which is when its event may leave.
	settling = 2 * time.Second
	// pauseTime is the time between two looks.
	pauseTime = 20 * time.Millisecond
)

var _ Sink = (*Feed)(nil)

// Changed implements Sink. It fails only when ctx ends: an event that came
// again later would come after its successors.
func (f *Feed) Changed(ctx context.Context, change Change) error {
	done, err := f.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	if !f.following() {
		f.index = nil
		return nil
	}
	if f.index == nil {
		return nil // Follow failed to list; nobody follows yet
	}
	if change.Kind == Gap {
		f.lose(ctx, errors.New("the bus lacks some events"))
		return nil
	}
	err = f.tell(ctx, change)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		f.lose(ctx, err)
	}
	return nil
}

// lose makes all followers list. The caller has the turn.
func (f *Feed) lose(ctx context.Context, cause error) {
	f.p.Log.WarnContext(ctx, "followers of container events cut off", slog.Any("error", cause))
	// Whatever the cause is, followers are told to come back.
	f.cutAll(fmt.Errorf("container events are lost: %w: %v", errdefs.ErrUnavailable, cause)) //nolint:errorlint // see above
	f.index = nil
}

// tell hands a change to the followers if it is news and true.
func (f *Feed) tell(ctx context.Context, change Change) error {
	change, err := f.complete(ctx, change)
	if err != nil {
		return err
	}
	s, news := f.index.step(change)
	if !news {
		f.p.Log.DebugContext(ctx, "event is no news", slog.String("id", change.ID), slog.Int("kind", int(change.Kind)))
		return nil
	}
	seen, err := f.look(ctx, change.ID, s)
	if errdefs.IsFailedPrecondition(err) {
		f.p.Log.WarnContext(ctx, "event is not true and dropped", slog.String("id", change.ID), slog.Any("error", err))
		return nil
	}
	if err != nil {
		return err
	}
	for _, kind := range kinds(s) {
		f.deliver(&criv1.ContainerEventResponse{
			ContainerId: change.ID, ContainerEventType: kind, CreatedAt: change.At.UnixNano(),
			PodSandboxStatus: seen.GetStatus(), ContainersStatuses: seen.GetContainers(),
		})
	}
	f.index.told(change.ID, s, gone(seen.GetStatus()))
	return nil
}

// complete asks for the sandbox of a new container whose event does not name it.
func (f *Feed) complete(ctx context.Context, change Change) (Change, error) {
	if change.Kind != ContainerCreated || change.SandboxID != "" || f.index.containers[change.ID] != nil {
		return change, nil
	}
	err := f.insist(ctx, func() error {
		resp, err := f.p.Containers.GetContainer(ctx, &containerv1.GetContainerRequest{ContainerId: change.ID})
		if errdefs.IsNotFound(err) {
			return nil
		}
		change.SandboxID = resp.GetSandboxId()
		return err
	})
	return change, err
}

// look returns the statuses of a step's sandbox, at least as new as the step. Of a removed
// sandbox it is the last status. Errors: FailedPrecondition if sandboxd says otherwise.
func (f *Feed) look(ctx context.Context, id string, s step) (*sandboxv1.GetSandboxResponse, error) {
	deadline := time.Now().Add(settling)
	for {
		var seen *sandboxv1.GetSandboxResponse
		err := f.insist(ctx, func() (err error) {
			seen, err = f.p.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{SandboxId: s.sandboxID})
			if errdefs.IsNotFound(err) {
				seen, err = nil, nil
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		if agrees(seen, id, s) {
			if seen == nil && s.sandbox != nil {
				seen = &sandboxv1.GetSandboxResponse{Status: s.sandbox.status}
			}
			return seen, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("sandboxd shows another state: %w", errdefs.ErrFailedPrecondition)
		}
		if !pause.For(ctx, pauseTime) {
			return nil, context.Cause(ctx)
		}
	}
}

// agrees tells whether what sandboxd shows is at least as far as the step.
func agrees(seen *sandboxv1.GetSandboxResponse, id string, s step) bool {
	if seen == nil {
		return true // all of it is gone
	}
	if s.container == nil {
		ready := seen.GetStatus().GetState() == criv1.PodSandboxState_SANDBOX_READY
		return s.stage == started || s.stage == stopped && !ready
	}
	at := slices.IndexFunc(seen.GetContainers(), func(c *criv1.ContainerStatus) bool { return c.GetId() == id })
	if at < 0 {
		return true // removed meanwhile, or just now
	}
	return s.stage < deleted && reached(seen.GetContainers()[at].GetState()) >= s.stage
}

// insist calls do until sandboxd answers, for as long as the patience lasts.
func (f *Feed) insist(ctx context.Context, do func() error) error {
	deadline := time.Now().Add(patience)
	for {
		err := do()
		if !errdefs.IsUnavailable(err) || time.Now().After(deadline) {
			return err
		}
		if !pause.For(ctx, pauseTime*5) {
			return context.Cause(ctx)
		}
	}
}

// kinds are the events that a step is told by. A sandbox is created and started at once.
func kinds(s step) []criv1.ContainerEventType {
	switch s.stage {
	case created:
		return []criv1.ContainerEventType{criv1.ContainerEventType_CONTAINER_CREATED_EVENT}
	case stopped:
		return []criv1.ContainerEventType{criv1.ContainerEventType_CONTAINER_STOPPED_EVENT}
	case deleted:
		return []criv1.ContainerEventType{criv1.ContainerEventType_CONTAINER_DELETED_EVENT}
	default:
		if s.container != nil {
			return []criv1.ContainerEventType{criv1.ContainerEventType_CONTAINER_STARTED_EVENT}
		}
		return []criv1.ContainerEventType{
			criv1.ContainerEventType_CONTAINER_CREATED_EVENT, criv1.ContainerEventType_CONTAINER_STARTED_EVENT,
		}
	}
}

// gone is a status as it is told once its sandbox was removed.
func gone(status *criv1.PodSandboxStatus) *criv1.PodSandboxStatus {
	if status == nil || status.GetState() == criv1.PodSandboxState_SANDBOX_NOTREADY {
		return status
	}
	status = proto.CloneOf(status)
	status.State = criv1.PodSandboxState_SANDBOX_NOTREADY
	return status
}
