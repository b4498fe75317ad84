package events

import (
	"context"
	"log/slog"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	minRedelivery = 100 * time.Millisecond
	maxRedelivery = 30 * time.Second
	// maxShift is the number of doublings after which the delay is at its limit anyway.
	maxShift = 10
)

// Delivery is one event as the bus delivers it.
type Delivery struct {
	// Sequence is its place in the stream.
	Sequence uint64
	Subject  string
	// ID is what the producer gave it.
	ID string
	// Stored is when the stream stored it.
	Stored time.Time
	// Attempt counts the deliveries of this event to this consumer, from 1.
	Attempt uint64
	// Pending is the number of events that wait behind it.
	Pending  uint64
	Envelope *types.Envelope
}

// deliver hands one message over and tells the bus what came of it.
func (c *consumer) deliver(ctx context.Context, msg jetstream.Msg) {
	d, err := parse(msg)
	if err != nil {
		c.outcome("malformed")
		c.tel.Log.WarnContext(ctx, "malformed event dropped", slog.String(telemetry.KeySubject, msg.Subject()),
			slog.Any(telemetry.KeyError, err))
		c.answered(ctx, msg.Term())
		return
	}
	if err := c.call(ctx, msg, d); err != nil {
		if ctx.Err() != nil {
			c.answered(ctx, msg.Nak()) // cut off by the stop, not failed
			return
		}
		c.outcome("retried")
		c.tel.Log.WarnContext(ctx, "event not handled, it comes again", slog.String(telemetry.KeySubject, d.Subject),
			slog.Uint64(telemetry.KeySequence, d.Sequence), slog.Any(telemetry.KeyError, err))
		c.answered(ctx, msg.NakWithDelay(redelivery(d.Attempt)))
		return
	}
	c.outcome("handled")
	c.place.last = max(c.place.last, d.Sequence)
	c.answered(ctx, msg.Ack())
}

// call runs the handler in a span of its own trace: the producer does not wait for it.
func (c *consumer) call(ctx context.Context, msg jetstream.Msg, d Delivery) error {
	opts := []trace.SpanStartOption{
		trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(
			attribute.String(telemetry.KeySubject, d.Subject),
			attribute.Int64(telemetry.KeySequence, int64(d.Sequence))),
	}
	producer := trace.SpanContextFromContext(
		c.tel.Propagator.Extract(context.WithoutCancel(ctx), headerCarrier(msg.Headers())))
	if producer.IsValid() {
		opts = append(opts, trace.WithLinks(trace.Link{SpanContext: producer}))
	}
	ctx, span := c.tel.Tracer.Start(ctx, "events.consume", opts...)
	defer span.End()
	release := keepAlive(msg)
	defer release()
	err := c.handle(ctx, d)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	return err
}

// keepAlive tells the bus that the event is being worked on, until it is released.
func keepAlive(msg jetstream.Msg) (release func()) {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(ackWait / 3)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				if msg.InProgress() != nil {
					return // the connection is gone; the event comes again
				}
			case <-stop:
				return
			}
		}
	}()
	return func() {
		close(stop)
		<-done
	}
}

// answered notes an answer that did not get out; the event then comes again.
func (c *consumer) answered(ctx context.Context, err error) {
	if err != nil {
		c.tel.Log.DebugContext(ctx, "event not acknowledged", slog.Any(telemetry.KeyError, err))
	}
}

func (c *consumer) outcome(name string) {
	c.delivered.WithLabelValues(c.session.role, name).Inc()
}

func parse(msg jetstream.Msg) (Delivery, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return Delivery{}, err
	}
	envelope := &types.Envelope{}
	if err := proto.Unmarshal(msg.Data(), envelope); err != nil {
		return Delivery{}, err
	}
	return Delivery{
		Sequence: meta.Sequence.Stream,
		Subject:  msg.Subject(),
		ID:       msg.Headers().Get(jetstream.MsgIDHeader),
		Stored:   meta.Timestamp,
		Attempt:  meta.NumDelivered,
		Pending:  meta.NumPending,
		Envelope: envelope,
	}, nil
}

func redelivery(attempt uint64) time.Duration {
	shift := min(max(attempt, 1)-1, maxShift)
	return min(minRedelivery<<shift, maxRedelivery)
}
