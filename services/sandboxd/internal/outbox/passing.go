package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/typeurl/v2"
	"go.opentelemetry.io/otel/propagation"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

const (
	// passingQueue bounds the passing events that wait; more are dropped.
	passingQueue = 64
	// passingTimeout bounds the publication of one.
	passingTimeout = 5 * time.Second
)

// Passing publishes events that are news of the moment and of no use later. They are never
// written to disk: while the bus is away they are dropped, without a gap event. Those that
// are published are in the order in which they were told.
type Passing struct {
	publish Publish
	log     *slog.Logger
	queue   chan *recordv1.Event
}

// NewPassing returns a publisher of passing events. Run it once.
func NewPassing(publish Publish, log *slog.Logger) *Passing {
	return &Passing{publish: publish, log: log, queue: make(chan *recordv1.Event, passingQueue)}
}

// Tell hands an event over and returns at once. The id must be different for each event.
func (p *Passing) Tell(ctx context.Context, namespace, topic, id string, payload proto.Message) {
	encoded, err := typeurl.MarshalAny(payload)
	if err != nil {
		p.log.WarnContext(ctx, "event is lost", slog.String("topic", topic), slog.Any("error", err))
		return
	}
	env, err := proto.Marshal(&types.Envelope{
		Timestamp: timestamppb.Now(), Namespace: namespace, Topic: topic,
		Event: &anypb.Any{TypeUrl: encoded.GetTypeUrl(), Value: encoded.GetValue()},
	})
	if err != nil {
		p.log.WarnContext(ctx, "event is lost", slog.String("topic", topic), slog.Any("error", err))
		return
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	select {
	case p.queue <- &recordv1.Event{Topic: topic, MessageId: id, Envelope: env, TraceContext: carrier}:
	default:
		p.log.DebugContext(ctx, "passing event dropped", slog.String("topic", topic))
	}
}

// Run publishes until ctx ends.
func (p *Passing) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-p.queue:
			if err := p.send(ctx, e); err != nil && ctx.Err() == nil {
				p.log.DebugContext(ctx, "passing events dropped: the bus is away", slog.Any("error", err))
				p.empty()
			}
		}
	}
}

func (p *Passing) send(ctx context.Context, e *recordv1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, passingTimeout)
	defer cancel()
	if err := p.publish(ctx, e); err != nil {
		return fmt.Errorf("event %s: %w", e.GetTopic(), err)
	}
	return nil
}

// empty drops what waits: it is out of date by now.
func (p *Passing) empty() {
	for {
		select {
		case <-p.queue:
		default:
			return
		}
	}
}
