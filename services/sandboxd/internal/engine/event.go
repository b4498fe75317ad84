package engine

import (
	"context"
	"fmt"
	"log/slog"
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
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Topics of events, in containerd's form.
const (
	TopicTaskCreate      = "/tasks/create"
	TopicTaskStart       = "/tasks/start"
	TopicTaskExit        = "/tasks/exit"
	TopicTaskDelete      = "/tasks/delete"
	TopicTaskOOM         = "/tasks/oom"
	TopicContainerCreate = "/containers/create"
	TopicContainerDelete = "/containers/delete"
	TopicSandboxStart    = "/sandboxes/start"
	TopicSandboxExit     = "/sandboxes/exit"
	TopicSandboxDelete   = "/sandboxes/delete"
)

// event makes an outbox entry. The id must be the same for every repetition of the event.
func event(ctx context.Context, topic, id string, keep bool, payload proto.Message) (*recordv1.Event, error) {
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

// appendEvents adds events to a transaction, in order.
func appendEvents(tx *store.Tx, evs ...*recordv1.Event) error {
	for _, ev := range evs {
		err := tx.AppendEvent(ev)
		if err != nil {
			return err
		}
	}
	return nil
}

// createEvent tells of a new container and of the sandbox that it is in.
func createEvent(ctx context.Context, c *recordv1.Container, runtimeType string) (*recordv1.Event, error) {
	place, err := typeurl.MarshalAny(&eventv1.ContainerPlace{SandboxId: c.GetSandboxId()})
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", TopicContainerCreate, err)
	}
	return event(ctx, TopicContainerCreate, "container-"+c.GetId(), false, &events.ContainerCreate{
		ID: c.GetId(), Image: c.GetImageRef(), Runtime: &events.ContainerCreate_Runtime{
			Name: runtimeType, Options: &anypb.Any{TypeUrl: place.GetTypeUrl(), Value: place.GetValue()},
		},
	})
}

// startEvents are the events of a container's start.
func startEvents(ctx context.Context, c *recordv1.Container) ([]*recordv1.Event, error) {
	create, err := event(ctx, TopicTaskCreate, messageID("create", c.GetId(), c.GetPid()), false,
		&events.TaskCreate{ContainerID: c.GetId(), Pid: c.GetPid()})
	if err != nil {
		return nil, err
	}
	start, err := event(ctx, TopicTaskStart, messageID("start", c.GetId(), c.GetPid()), false,
		&events.TaskStart{ContainerID: c.GetId(), Pid: c.GetPid()})
	if err != nil {
		return nil, err
	}
	return []*recordv1.Event{create, start}, nil
}

func exitEvent(ctx context.Context, c *recordv1.Container) (*recordv1.Event, error) {
	return event(ctx, TopicTaskExit, messageID("exit", c.GetId(), c.GetPid()), true, &events.TaskExit{
		ContainerID: c.GetId(), ID: c.GetId(), Pid: c.GetPid(),
		ExitStatus: uint32(c.GetExitCode()), ExitedAt: c.GetFinishedAt(),
	})
}

func deleteEvent(ctx context.Context, c *recordv1.Container) (*recordv1.Event, error) {
	return event(ctx, TopicTaskDelete, messageID("delete", c.GetId(), c.GetPid()), true, &events.TaskDelete{
		ContainerID: c.GetId(), ID: c.GetId(), Pid: c.GetPid(),
		ExitStatus: uint32(c.GetExitCode()), ExitedAt: c.GetFinishedAt(),
	})
}

func messageID(what, id string, pid uint32) string {
	return fmt.Sprintf("%s-%s-%d", what, id, pid)
}

func timestamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t) }

// Publish puts an event that belongs to no record of the engine into the outbox.
func (e *Engine) Publish(ctx context.Context, topic string, payload proto.Message) {
	e.publish(ctx, topic, newID(), payload)
}

func (e *Engine) publish(ctx context.Context, topic, id string, payload proto.Message) {
	ev, err := event(ctx, topic, id, false, payload)
	if err == nil {
		err = e.p.Store.Update(context.WithoutCancel(ctx), func(tx *store.Tx) error { return tx.AppendEvent(ev) })
	}
	if err != nil {
		e.log.WarnContext(ctx, "event is lost", slog.String("topic", topic), slog.Any("error", err))
	}
}
