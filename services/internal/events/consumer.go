package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	// attemptTimeout bounds one attempt to find or make the consumer.
	attemptTimeout = 5 * time.Second
	minRetryDelay  = 100 * time.Millisecond
	maxRetryDelay  = 2 * time.Second
	// prefetch and ackWait are small: after a consumer was killed, the events that it had
	// fetched are delivered again only when ackWait is over.
	prefetch      = 8
	ackWait       = 10 * time.Second
	pullExpiry    = 10 * time.Second
	pullHeartbeat = time.Second
	// drainLimit bounds the wait for what was fetched when the reading ends.
	drainLimit = 2 * time.Second
	// idleLimit ends a consumer without a durable name after its reader is gone.
	idleLimit = time.Minute
)

// ConsumerConfig says which events are wanted.
type ConsumerConfig struct {
	// Durable names the place in the stream that the bus remembers. Each node has its
	// own, unless AllNodes is set. Empty begins anew with each call of Consume.
	Durable string
	// Topics are the wanted topics, as "/tasks/exit" or "tasks.exit"; a last element ">"
	// stands for everything below. Empty means all topics.
	Topics []string
	// StartSeq is where a place that does not exist yet begins; zero means the oldest
	// event. A number that the stream has not reached yet (because its store was wiped)
	// also begins with the oldest.
	StartSeq uint64
	// New begins a place that does not exist yet after the newest event.
	New bool
	// AllNodes asks for the events of all nodes instead of those of this one.
	AllNodes bool
	// Connected, if set, is told each time the connection to the bus comes or goes. It
	// must not block.
	Connected func(bool)
}

// Consume calls handle for one event after the other until ctx is done; then it returns
// nil. It returns an error only for a configuration that can never work. An event for
// which handle returned an error comes again later, with growing delays. The context of
// handle carries a new span that is linked to the one of the producer.
//
// The bus need not be there at the start. After a restart the consumer goes on where
// it was; after the bus lost its store it begins with the oldest event of the new one.
func Consume(ctx context.Context, cfg ClientConfig, tel *telemetry.Telemetry, want ConsumerConfig, handle func(ctx context.Context, d Delivery) error) error {
	if err := errors.Join(cfg.Validate(), want.validate()); err != nil {
		return fmt.Errorf("event consumer: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return fmt.Errorf("event consumer: %w", err)
	}
	c := newConsumer(cfg, tel, want, handle)
	defer c.session.close()
	c.run(ctx)
	return nil
}

func (c ConsumerConfig) validate() error {
	if c.New && c.StartSeq > 0 {
		return errors.New("a start sequence and new events only exclude each other")
	}
	return nil
}

type consumer struct {
	cfg       ClientConfig
	tel       *telemetry.Telemetry
	want      ConsumerConfig
	handle    func(ctx context.Context, d Delivery) error
	session   *session
	delivered *prometheus.CounterVec
	// place is what is known of the stream from earlier rounds; one goroutine uses it.
	place place
}

// place remembers how far the consumer came in which stream.
type place struct {
	known   bool
	created time.Time
	last    uint64
}

func newConsumer(cfg ClientConfig, tel *telemetry.Telemetry, want ConsumerConfig, handle func(context.Context, Delivery) error) *consumer {
	role := "consumer"
	if want.Durable != "" {
		role = want.Durable
	}
	return &consumer{
		cfg: cfg, tel: tel, want: want, handle: handle, session: newSession(cfg, tel, role, want.Connected),
		delivered: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_events_consumed_total",
			Help: "Events delivered by the bus, by outcome: handled, retried or malformed.",
		}, []string{"consumer", "outcome"})),
	}
}

func (c *consumer) run(ctx context.Context) {
	delay := minRetryDelay
	level := slog.LevelWarn
	for ctx.Err() == nil {
		began := time.Now()
		err := c.round(ctx)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errRestarted) {
			continue
		}
		if time.Since(began) > maxRetryDelay {
			delay, level = minRetryDelay, slog.LevelWarn
		}
		c.tel.Log.LogAttrs(ctx, level, "event consumer starts over", slog.String("consumer", c.session.role),
			slog.Any(telemetry.KeyError, err))
		level = slog.LevelDebug // one line for each trouble is enough
		pause.For(ctx, delay)
		delay = min(2*delay, maxRetryDelay)
	}
}

// errRestarted ends a round because the connection was made anew: the consumer may be gone.
var errRestarted = errors.New("the connection to the bus was made anew")

// round finds or makes the consumer and reads from it until something breaks. What
// breaks ends the reading only: the handler at work goes on.
func (c *consumer) round(ctx context.Context) error {
	nc, err := c.session.get(ctx)
	if err != nil {
		return err
	}
	readCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stopWatch := watchReconnect(readCtx, nc, cancel)
	defer stopWatch()
	cons, err := c.open(readCtx, nc)
	if err != nil {
		return err
	}
	messages, err := cons.Messages(jetstream.PullMaxMessages(prefetch), jetstream.PullExpiry(pullExpiry),
		jetstream.PullHeartbeat(pullHeartbeat))
	if err != nil {
		return classify(err)
	}
	defer c.finish(ctx, messages)
	for {
		msg, err := messages.Next(jetstream.NextContext(readCtx))
		if readCtx.Err() != nil && err != nil {
			return context.Cause(readCtx)
		}
		if err != nil {
			return classify(err)
		}
		c.deliver(ctx, msg)
	}
}

// finish deals with the messages that were fetched but not handled: without an answer
// the bus would keep them back until ackWait is over. While the bus is away the library
// waits for it to confirm that no more will come, which nobody needs then.
func (c *consumer) finish(ctx context.Context, messages jetstream.MessagesContext) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainLimit)
	defer cancel()
	defer messages.Stop()
	messages.Drain()
	for {
		msg, err := messages.Next(jetstream.NextContext(limited))
		if err != nil {
			return
		}
		if ctx.Err() != nil {
			c.answered(ctx, msg.Nak())
			continue
		}
		c.deliver(ctx, msg)
	}
}

// watchReconnect cancels with errRestarted when nc is connected again or closed.
func watchReconnect(ctx context.Context, nc *nats.Conn, cancel context.CancelCauseFunc) func() {
	changes := nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-changes:
			cancel(errRestarted)
		case <-ctx.Done():
		}
	}()
	return func() {
		cancel(nil)
		<-done
		nc.RemoveStatusListener(changes)
	}
}

func (c *consumer) open(ctx context.Context, nc *nats.Conn) (jetstream.Consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, unavailable(err)
	}
	stream, err := js.Stream(ctx, c.cfg.Stream)
	if err != nil {
		return nil, classify(err)
	}
	info := stream.CachedInfo()
	cons, err := c.find(ctx, stream)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		cons, err = stream.CreateConsumer(ctx, c.fresh(info))
	}
	if err != nil {
		return nil, classify(err)
	}
	if !c.place.known || !c.place.created.Equal(info.Created) {
		c.place = place{known: true, created: info.Created}
	}
	return cons, nil
}

// find returns the durable consumer with the wanted filter; an existing one that asks
// for other topics is changed and keeps its place.
func (c *consumer) find(ctx context.Context, stream jetstream.Stream) (jetstream.Consumer, error) {
	if c.want.Durable == "" {
		return nil, jetstream.ErrConsumerNotFound
	}
	cons, err := stream.Consumer(ctx, c.name())
	if err != nil {
		return nil, err
	}
	have := cons.CachedInfo().Config
	filters := have.FilterSubjects
	if have.FilterSubject != "" {
		filters = []string{have.FilterSubject}
	}
	if slices.Equal(filters, c.filters()) {
		return cons, nil
	}
	have.FilterSubject, have.FilterSubjects = "", c.filters()
	return stream.UpdateConsumer(ctx, have)
}

// fresh returns the configuration of a consumer that does not exist yet.
func (c *consumer) fresh(info *jetstream.StreamInfo) jetstream.ConsumerConfig {
	cfg := jetstream.ConsumerConfig{
		Durable:        c.name(),
		AckPolicy:      jetstream.AckExplicitPolicy,
		AckWait:        ackWait,
		MaxAckPending:  2 * prefetch,
		FilterSubjects: c.filters(),
		DeliverPolicy:  jetstream.DeliverAllPolicy,
	}
	if c.want.Durable == "" {
		cfg.InactiveThreshold = idleLimit
	}
	start := c.want.StartSeq
	switch {
	case c.place.known && c.place.created.Equal(info.Created) && c.place.last > 0:
		start = c.place.last + 1
	case c.place.known && !c.place.created.Equal(info.Created):
		start = 0
	case c.want.New:
		cfg.DeliverPolicy = jetstream.DeliverNewPolicy
	}
	if start > 0 && start <= info.State.LastSeq+1 {
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, start
	}
	return cfg
}

// name is the durable name at the bus, "" without one.
func (c *consumer) name() string {
	if c.want.Durable == "" || c.want.AllNodes {
		return c.want.Durable
	}
	return token(c.want.Durable) + "-" + token(c.cfg.Node)
}

func (c *consumer) filters() []string {
	node := c.cfg.Node
	if c.want.AllNodes {
		node = ""
	}
	if len(c.want.Topics) == 0 {
		return []string{filterSubject(node, ">")}
	}
	filters := make([]string, 0, len(c.want.Topics))
	for _, t := range c.want.Topics {
		filters = append(filters, filterSubject(node, t))
	}
	return filters
}
