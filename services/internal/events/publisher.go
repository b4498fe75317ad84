package events

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const contentType = "application/protobuf"

// Message is one event to be published.
type Message struct {
	// ID identifies the event; a repetition within the stream's window is dropped.
	ID string
	// Topic is the topic of the envelope, such as "/tasks/exit".
	Topic string
	// Envelope is an encoded containerd types.Envelope.
	Envelope []byte
	// Namespace is that of the envelope; empty takes it out of Envelope.
	Namespace string
	// TraceContext is what TraceContext returned where the event arose; without it the
	// trace of the publishing context is used.
	TraceContext map[string]string
}

// Publisher publishes events. It is safe for concurrent use.
type Publisher struct {
	session   *session
	published *prometheus.CounterVec
}

// NewPublisher makes a publisher. It does not connect: the first Publish does.
func NewPublisher(cfg ClientConfig, tel *telemetry.Telemetry) (*Publisher, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("event bus: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("event bus: %w", err)
	}
	return &Publisher{
		session: newSession(cfg, tel, "publisher", nil),
		published: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_events_published_total",
			Help: "Publications to the bus, by outcome: stored, duplicate or failed.",
		}, []string{"outcome"})),
	}, nil
}

// Publish returns nil when the stream has stored the event or knows its id already. If
// the bus is not there it waits for it until the deadline of ctx (or the configured
// limit) and returns errdefs.ErrUnavailable; the event may then be stored all the
// same, so publish it again with the same id. An event that can never be published is
// errdefs.ErrInvalidArgument.
func (p *Publisher) Publish(ctx context.Context, m Message) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.session.cfg.PublishTimeout.Std())
		defer cancel()
	}
	duplicate, err := p.publish(ctx, m)
	outcome := "stored"
	switch {
	case err != nil:
		outcome = "failed"
	case duplicate:
		outcome = "duplicate"
	}
	p.published.WithLabelValues(outcome).Inc()
	return err
}

func (p *Publisher) publish(ctx context.Context, m Message) (duplicate bool, err error) {
	subject, err := p.subject(m)
	if err != nil {
		return false, fmt.Errorf("event %q: %w", m.ID, err)
	}
	// The connection is awaited before the span begins: a bus that is down for an hour
	// must not fill a trace with failed attempts.
	nc, err := p.session.get(ctx)
	if err != nil {
		return false, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return false, unavailable(err)
	}
	if len(m.TraceContext) > 0 {
		ctx = p.session.tel.Propagator.Extract(ctx, propagation.MapCarrier(m.TraceContext))
	}
	ctx, span := p.session.tel.Tracer.Start(ctx, "events.publish", trace.WithSpanKind(trace.SpanKindProducer),
		trace.WithAttributes(attribute.String(telemetry.KeySubject, subject)))
	defer span.End()
	ack, err := js.PublishMsg(ctx, p.message(ctx, subject, m), jetstream.WithExpectStream(p.session.cfg.Stream))
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		return false, fmt.Errorf("event %q: %w", m.ID, classify(err))
	}
	span.SetAttributes(attribute.Int64(telemetry.KeySequence, int64(ack.Sequence)))
	return ack.Duplicate, nil
}

func (p *Publisher) message(ctx context.Context, subject string, m Message) *nats.Msg {
	msg := nats.NewMsg(subject)
	msg.Data = m.Envelope
	msg.Header.Set(jetstream.MsgIDHeader, m.ID)
	msg.Header.Set("Content-Type", contentType)
	p.session.tel.Propagator.Inject(ctx, headerCarrier(msg.Header))
	return msg
}

func (p *Publisher) subject(m Message) (string, error) {
	if m.ID == "" || m.Topic == "" {
		return "", fmt.Errorf("id and topic are wanted: %w", errdefs.ErrInvalidArgument)
	}
	namespace := m.Namespace
	if namespace == "" {
		var envelope types.Envelope
		if err := proto.Unmarshal(m.Envelope, &envelope); err != nil {
			return "", fmt.Errorf("envelope: %w: %w", errdefs.ErrInvalidArgument, err)
		}
		namespace = envelope.GetNamespace()
	}
	return Subject(p.session.cfg.Node, namespace, m.Topic), nil
}

// Connected waits until there is a connection to the bus or ctx is done.
func (p *Publisher) Connected(ctx context.Context) error {
	_, err := p.session.get(ctx)
	return err
}

// Close ends the connection. A publication that is under way fails.
func (p *Publisher) Close() { p.session.close() }
