package tail

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	eventsv1 "github.com/containerd/containerd/api/events"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/internal/events"
)

const timeFormat = "2006-01-02T15:04:05.000Z07:00"

// record is one event in JSON.
type record struct {
	Sequence  uint64          `json:"sequence"`
	Subject   string          `json:"subject"`
	ID        string          `json:"id"`
	Timestamp time.Time       `json:"timestamp"`
	Namespace string          `json:"namespace"`
	Topic     string          `json:"topic"`
	Type      string          `json:"type"`
	Event     json.RawMessage `json:"event"`
}

// decode returns the message inside the envelope, nil for a type that is not known.
func decode(d events.Delivery) proto.Message {
	inner := d.Envelope.GetEvent()
	if inner == nil {
		return nil
	}
	v, err := typeurl.UnmarshalAny(inner)
	if err != nil {
		return nil
	}
	m, ok := v.(proto.Message)
	if !ok {
		return nil
	}
	return m
}

// jsonLine renders an event as one JSON object. An event of an unknown type has its
// bytes, in base64, as the value of "event".
func jsonLine(d events.Delivery) ([]byte, error) {
	r := record{
		Sequence:  d.Sequence,
		Subject:   d.Subject,
		ID:        d.ID,
		Timestamp: d.Envelope.GetTimestamp().AsTime(),
		Namespace: d.Envelope.GetNamespace(),
		Topic:     d.Envelope.GetTopic(),
		Type:      d.Envelope.GetEvent().GetTypeUrl(),
	}
	var err error
	if m := decode(d); m != nil {
		r.Event, err = protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
	} else {
		r.Event, err = json.Marshal(d.Envelope.GetEvent().GetValue())
	}
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", d.ID, err)
	}
	return json.Marshal(r)
}

// humanLine renders an event for people: time, sequence, topic and what matters of it.
func humanLine(d events.Delivery) []byte {
	parts := []string{
		d.Envelope.GetTimestamp().AsTime().Local().Format(timeFormat),
		strconv.FormatUint(d.Sequence, 10),
		d.Envelope.GetTopic(),
	}
	return []byte(strings.Join(append(parts, fields(d)...), " "))
}

func fields(d events.Delivery) []string {
	switch e := decode(d).(type) {
	case *eventsv1.TaskCreate:
		return []string{"container=" + e.GetContainerID(), pid(e.GetPid())}
	case *eventsv1.TaskStart:
		return []string{"container=" + e.GetContainerID(), pid(e.GetPid())}
	case *eventsv1.TaskExit:
		return ended(e.GetContainerID(), e.GetID(), e.GetPid(), e.GetExitStatus())
	case *eventsv1.TaskDelete:
		return ended(e.GetContainerID(), e.GetID(), e.GetPid(), e.GetExitStatus())
	case *eventsv1.TaskExecAdded:
		return []string{"container=" + e.GetContainerID(), "exec=" + e.GetExecID()}
	case *eventsv1.TaskExecStarted:
		return []string{"container=" + e.GetContainerID(), "exec=" + e.GetExecID(), pid(e.GetPid())}
	case *eventsv1.SandboxExit:
		return []string{"sandbox=" + e.GetSandboxID(), fmt.Sprintf("exit=%d", e.GetExitStatus())}
	case *eventsv1.ContainerCreate:
		return []string{"container=" + e.GetID(), "image=" + e.GetImage()}
	case *eventsv1.ContainerDelete:
		return []string{"container=" + e.GetID()}
	case *eventv1.SandboxDelete:
		return []string{"sandbox=" + e.GetSandboxId()}
	case *eventv1.ImageProgress:
		return pullProgress(e)
	case *eventv1.Gap:
		return []string{fmt.Sprintf("dropped=%d", e.GetDropped())}
	case containerEvent:
		return []string{"container=" + e.GetContainerID()}
	case sandboxEvent:
		return []string{"sandbox=" + e.GetSandboxID()}
	case imageEvent:
		return []string{"image=" + e.GetName()}
	}
	return []string{"type=" + d.Envelope.GetEvent().GetTypeUrl()}
}

// pullProgress describes how far a pull is.
func pullProgress(e *eventv1.ImageProgress) []string {
	out := []string{
		"image=" + e.GetImage(),
		"state=" + strings.ToLower(strings.TrimPrefix(e.GetState().String(), "PULL_STATE_")),
		fmt.Sprintf("bytes=%d/%d", e.GetBytesDone(), e.GetBytesTotal()),
		fmt.Sprintf("fetched=%d/%d", e.GetLayersFetched(), e.GetLayersTotal()),
		fmt.Sprintf("unpacked=%d/%d", e.GetLayersUnpacked(), e.GetLayersTotal()),
	}
	if e.GetError() != "" {
		out = append(out, fmt.Sprintf("error=%q", e.GetError()))
	}
	return out
}

// Events about which there is nothing more to say than what they are about.
type (
	containerEvent interface {
		proto.Message
		GetContainerID() string
	}
	sandboxEvent interface {
		proto.Message
		GetSandboxID() string
	}
	imageEvent interface {
		proto.Message
		GetName() string
	}
)

func pid(n uint32) string { return fmt.Sprintf("pid=%d", n) }

// ended describes the end of a process; one that is not the container's first is an exec.
func ended(container, id string, n, status uint32) []string {
	out := []string{"container=" + container}
	if id != "" && id != container {
		out = append(out, "exec="+id)
	}
	return append(out, pid(n), fmt.Sprintf("exit=%d", status))
}
