// Package event makes the events that sandboxd owes the world: containerd's messages in
// containerd's envelope, ready for the outbox. An event has the same message id each time
// that it is made, so that a repetition is told once.
//
// It makes values only; who makes an event writes it together with the record that it is
// about.
package event

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/typeurl/v2"
	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Topics of events, in containerd's form.
const (
	TopicTaskCreate      = "/tasks/create"
	TopicTaskStart       = "/tasks/start"
	TopicTaskExit        = "/tasks/exit"
	TopicTaskDelete      = "/tasks/delete"
	TopicTaskOOM         = "/tasks/oom"
	TopicTaskPaused      = "/tasks/paused"
	TopicTaskResumed     = "/tasks/resumed"
	TopicTaskCheckpoint  = "/tasks/checkpointed"
	TopicContainerCreate = "/containers/create"
	TopicContainerDelete = "/containers/delete"
	TopicSandboxStart    = "/sandboxes/start"
	TopicSandboxExit     = "/sandboxes/exit"
	TopicSandboxDelete   = "/sandboxes/delete"
)

// New makes an outbox entry. The id must be the same for every repetition of the event;
// keep says that it must not be dropped when the outbox is full.
func New(ctx context.Context, topic, id string, keep bool, payload proto.Message) (*recordv1.Event, error) {
	encoded, err := typeurl.MarshalAny(payload)
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", topic, err)
	}
	env, err := proto.Marshal(&types.Envelope{
		Timestamp: timestamppb.Now(),
		Namespace: pod.Namespace,
		Topic:     topic,
		Event:     &anypb.Any{TypeUrl: encoded.GetTypeUrl(), Value: encoded.GetValue()},
	})
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", topic, err)
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return &recordv1.Event{Topic: topic, MessageId: id, Envelope: env, TraceContext: carrier, Keep: keep}, nil
}

// ContainerCreate tells of a new container and of the sandbox that it is in.
func ContainerCreate(ctx context.Context, c *recordv1.Container, runtimeType string) (*recordv1.Event, error) {
	place, err := typeurl.MarshalAny(&eventv1.ContainerPlace{SandboxId: c.GetSandboxId()})
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", TopicContainerCreate, err)
	}
	return New(ctx, TopicContainerCreate, "container-"+c.GetId(), false, &events.ContainerCreate{
		ID: c.GetId(), Image: c.GetImageRef(), Runtime: &events.ContainerCreate_Runtime{
			Name: runtimeType, Options: &anypb.Any{TypeUrl: place.GetTypeUrl(), Value: place.GetValue()},
		},
	})
}

// ContainerDelete tells that a container was removed.
func ContainerDelete(ctx context.Context, id string) (*recordv1.Event, error) {
	return New(ctx, TopicContainerDelete, "container-delete-"+id, true, &events.ContainerDelete{ID: id})
}

// TaskStart are the two events of a container's start.
func TaskStart(ctx context.Context, c *recordv1.Container) ([]*recordv1.Event, error) {
	create, err := New(ctx, TopicTaskCreate, messageID("create", c), false,
		&events.TaskCreate{ContainerID: c.GetId(), Pid: c.GetPid()})
	if err != nil {
		return nil, err
	}
	start, err := New(ctx, TopicTaskStart, messageID("start", c), false,
		&events.TaskStart{ContainerID: c.GetId(), Pid: c.GetPid()})
	if err != nil {
		return nil, err
	}
	return []*recordv1.Event{create, start}, nil
}

// TaskExit tells of the end that the record holds.
func TaskExit(ctx context.Context, c *recordv1.Container) (*recordv1.Event, error) {
	return New(ctx, TopicTaskExit, messageID("exit", c), true, &events.TaskExit{
		ContainerID: c.GetId(), ID: c.GetId(), Pid: c.GetPid(),
		ExitStatus: uint32(c.GetExitCode()), ExitedAt: c.GetFinishedAt(),
	})
}

// TaskDelete tells that an ended task was deleted.
func TaskDelete(ctx context.Context, c *recordv1.Container) (*recordv1.Event, error) {
	return New(ctx, TopicTaskDelete, messageID("delete", c), true, &events.TaskDelete{
		ContainerID: c.GetId(), ID: c.GetId(), Pid: c.GetPid(),
		ExitStatus: uint32(c.GetExitCode()), ExitedAt: c.GetFinishedAt(),
	})
}

// TaskOOM tells that the kernel killed a process of the container for lack of memory.
func TaskOOM(ctx context.Context, c *recordv1.Container, keep bool) (*recordv1.Event, error) {
	return New(ctx, TopicTaskOOM, messageID("oom", c), keep, &events.TaskOOM{ContainerID: c.GetId()})
}

// TaskPaused tells that a container's processes were paused; once is a name for this time.
func TaskPaused(ctx context.Context, c *recordv1.Container, once string) (*recordv1.Event, error) {
	return New(ctx, TopicTaskPaused, "paused-"+once, false, &events.TaskPaused{ContainerID: c.GetId()})
}

// TaskResumed tells that a container's processes run again.
func TaskResumed(ctx context.Context, c *recordv1.Container, once string) (*recordv1.Event, error) {
	return New(ctx, TopicTaskResumed, "resumed-"+once, false, &events.TaskResumed{ContainerID: c.GetId()})
}

// TaskCheckpointed tells that the state of a container's processes was written.
func TaskCheckpointed(ctx context.Context, c *recordv1.Container, once string) (*recordv1.Event, error) {
	return New(ctx, TopicTaskCheckpoint, "checkpointed-"+once, false, &events.TaskCheckpointed{ContainerID: c.GetId()})
}

// SandboxStart tells that a sandbox is ready.
func SandboxStart(ctx context.Context, id string) (*recordv1.Event, error) {
	return New(ctx, TopicSandboxStart, "start-"+id, false, &events.SandboxStart{SandboxID: id})
}

// SandboxExit tells of the end of a sandbox, asked for or not.
func SandboxExit(ctx context.Context, id string, code uint32, at time.Time) (*recordv1.Event, error) {
	return New(ctx, TopicSandboxExit, "exit-"+id, true,
		&events.SandboxExit{SandboxID: id, ExitStatus: code, ExitedAt: timestamppb.New(at)})
}

// SandboxDelete tells that a sandbox was removed.
func SandboxDelete(ctx context.Context, id string) (*recordv1.Event, error) {
	return New(ctx, TopicSandboxDelete, "delete-"+id, true, &eventv1.SandboxDelete{SandboxId: id})
}

func messageID(what string, c *recordv1.Container) string {
	return fmt.Sprintf("%s-%s-%d", what, c.GetId(), c.GetPid())
}
