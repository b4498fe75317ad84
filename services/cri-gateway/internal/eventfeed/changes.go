package eventfeed

import (
	"context"
	"errors"
	"log/slog"

	taskevents "github.com/containerd/containerd/api/events"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/containerevents"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// changesRole is the name of the consumer of changes on the bus and in its metrics.
const changesRole = "cri-gateway-events"

// namespace is the one of the containers that kubelet runs.
const namespace = "k8s.io"

// topics of all changes.
func topics() []string {
	return []string{
		"/containers/create", "/tasks/start", exitTopic, "/containers/delete",
		"/sandboxes/start", "/sandboxes/exit", "/sandboxes/delete", "/crisp/gap",
	}
}

// RunChanges reads what happens to containers and sandboxes until ctx ends. It begins like
// Run, and a change may come twice in the same way. The callback connected is told each
// time the connection to the bus comes or goes; it must not block.
func RunChanges(
	ctx context.Context, cfg events.ClientConfig, tel *telemetry.Telemetry, sink containerevents.Sink, connected func(bool),
) error {
	want := events.ConsumerConfig{Durable: changesRole, Topics: topics(), New: true, Connected: connected}
	return events.Consume(ctx, cfg, tel, want, func(ctx context.Context, d events.Delivery) error {
		if d.Envelope.GetNamespace() != namespace {
			return nil
		}
		change, err := decode(d.Envelope.GetEvent())
		if err != nil {
			// It would be no better the next time.
			tel.Log.WarnContext(ctx, "event not understood", slog.Uint64(telemetry.KeySequence, d.Sequence),
				slog.Any(telemetry.KeyError, err))
			return nil
		}
		if change.Kind == 0 {
			return nil
		}
		change.At = d.Envelope.GetTimestamp().AsTime()
		return sink.Changed(ctx, change)
	})
}

var errUnknown = errors.New("not an event of a container or sandbox")

// decode reads an event. A change without a kind is one that nobody follows.
func decode(content *anypb.Any) (containerevents.Change, error) {
	event, err := typeurl.UnmarshalAny(content)
	if err != nil {
		return containerevents.Change{}, err
	}
	switch e := event.(type) {
	case *taskevents.ContainerCreate:
		return containerevents.Change{Kind: containerevents.ContainerCreated, ID: e.GetID(), SandboxID: sandboxOf(e)}, nil
	case *taskevents.TaskStart:
		return containerevents.Change{Kind: containerevents.ContainerStarted, ID: e.GetContainerID()}, nil
	case *taskevents.TaskExit:
		if e.GetID() != e.GetContainerID() {
			return containerevents.Change{}, nil // a command that was run in the container
		}
		return containerevents.Change{Kind: containerevents.ContainerStopped, ID: e.GetContainerID()}, nil
	case *taskevents.ContainerDelete:
		return containerevents.Change{Kind: containerevents.ContainerDeleted, ID: e.GetID()}, nil
	case *taskevents.SandboxStart:
		return containerevents.Change{Kind: containerevents.SandboxStarted, ID: e.GetSandboxID()}, nil
	case *taskevents.SandboxExit:
		return containerevents.Change{Kind: containerevents.SandboxStopped, ID: e.GetSandboxID()}, nil
	case *eventv1.SandboxDelete:
		return containerevents.Change{Kind: containerevents.SandboxDeleted, ID: e.GetSandboxId()}, nil
	case *eventv1.Gap:
		return containerevents.Change{Kind: containerevents.Gap}, nil
	}
	return containerevents.Change{}, errUnknown
}

// sandboxOf returns the sandbox that a new container is in, if the event says so.
func sandboxOf(e *taskevents.ContainerCreate) string {
	var place eventv1.ContainerPlace
	if options := e.GetRuntime().GetOptions(); options == nil || typeurl.UnmarshalTo(options, &place) != nil {
		return ""
	}
	return place.GetSandboxId()
}
