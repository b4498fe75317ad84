package events_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

const limit = testkit.Patience

func TestMain(m *testing.M) { testkit.Main(m) }

func envelope(t *testing.T, id string) events.Message {
	t.Helper()
	data, err := proto.Marshal(&types.Envelope{Namespace: "k8s.io", Topic: "/tasks/exit"})
	if err != nil {
		t.Fatal(err)
	}
	return events.Message{ID: id, Topic: "/tasks/exit", Envelope: data}
}

func publisher(t *testing.T, cfg events.ClientConfig) *events.Publisher {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	p, err := events.NewPublisher(cfg, tel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// publish repeats an event until the bus has it, as an outbox does.
func publish(t *testing.T, p *events.Publisher, ids ...string) {
	t.Helper()
	for _, id := range ids {
		publishMessage(t, p, envelope(t, id))
	}
}

func publishMessage(t *testing.T, p *events.Publisher, m events.Message) {
	t.Helper()
	testkit.Eventually(t, limit, func() error { return p.Publish(t.Context(), m) })
}

// reader is a consumer that notes the ids it gets.
type reader struct {
	cancel context.CancelFunc
	done   chan error

	mu     sync.Mutex
	ids    []string
	refuse func(d events.Delivery) error
}

func read(t *testing.T, cfg events.ClientConfig, want events.ConsumerConfig, refuse func(events.Delivery) error) *reader {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	ctx, cancel := context.WithCancel(context.Background())
	r := &reader{cancel: cancel, done: make(chan error, 1), refuse: refuse}
	go func() { r.done <- events.Consume(ctx, cfg, tel, want, r.handle) }()
	t.Cleanup(r.stop)
	return r
}

func (r *reader) handle(_ context.Context, d events.Delivery) error {
	if r.refuse != nil {
		if err := r.refuse(d); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ids = append(r.ids, d.ID)
	return nil
}

func (r *reader) stop() {
	r.cancel()
	err := <-r.done
	r.done <- err
}

func (r *reader) wants(t *testing.T, ids ...string) {
	t.Helper()
	testkit.Eventually(t, limit, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if diff := cmp.Diff(ids, slices.Clone(r.ids)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

func TestPublishedEventArrivesOnce(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	p := publisher(t, bus.Config())
	publish(t, p, "a", "b", "a", "c")
	r := read(t, bus.Config(), events.ConsumerConfig{Durable: "test", Topics: []string{"/tasks/exit"}}, nil)
	r.wants(t, "a", "b", "c")
	bus.With(func(js jetstream.JetStream) error {
		s, err := js.Stream(t.Context(), events.DefaultStream)
		if err != nil {
			return err
		}
		msg, err := s.GetMsg(t.Context(), 1)
		if err != nil {
			return err
		}
		if msg.Subject != "crisp.v1.node-1.k8s_io.tasks.exit" || msg.Header.Get("Content-Type") != "application/protobuf" {
			t.Errorf("subject %s, header %v", msg.Subject, msg.Header)
		}
		if len(msg.Header["traceparent"]) != 1 {
			t.Errorf("no lower case traceparent in %v", msg.Header)
		}
		return nil
	})
}

func TestTopicsAndNodesAreFiltered(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	other := bus.Config()
	other.Node = "node-2"
	publish(t, publisher(t, other), "elsewhere")
	p := publisher(t, bus.Config())
	gap := envelope(t, "gap")
	gap.Topic = "/crisp/gap"
	publishMessage(t, p, gap)
	publish(t, p, "exit")
	read(t, bus.Config(), events.ConsumerConfig{Durable: "a", Topics: []string{"tasks.exit"}}, nil).wants(t, "exit")
	read(t, bus.Config(), events.ConsumerConfig{Durable: "b"}, nil).wants(t, "gap", "exit")
	read(t, bus.Config(), events.ConsumerConfig{AllNodes: true}, nil).wants(t, "elsewhere", "gap", "exit")
	read(t, bus.Config(), events.ConsumerConfig{AllNodes: true, StartSeq: 2}, nil).wants(t, "gap", "exit")
	late := read(t, bus.Config(), events.ConsumerConfig{New: true}, nil)
	testkit.Eventually(t, limit, func() error { return consumers(t, bus, 5) })
	publish(t, p, "new")
	late.wants(t, "new")
}

func consumers(t *testing.T, bus *testkit.Bus, want int) error {
	t.Helper()
	var got int
	bus.With(func(js jetstream.JetStream) error {
		s, err := js.Stream(t.Context(), events.DefaultStream)
		if err == nil {
			got = s.CachedInfo().State.Consumers
		}
		return err
	})
	if got != want {
		return fmt.Errorf("%d consumers, want %d", got, want)
	}
	return nil
}

func TestFilterOfDurableFollowsTheProgram(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	p := publisher(t, bus.Config())
	publish(t, p, "a")
	r := read(t, bus.Config(), events.ConsumerConfig{Durable: "d", Topics: []string{"/tasks/exit"}}, nil)
	r.wants(t, "a")
	r.stop()
	wider := read(t, bus.Config(), events.ConsumerConfig{Durable: "d", Topics: []string{"/tasks/exit", "/crisp/gap"}}, nil)
	gap := envelope(t, "gap")
	gap.Topic = "/crisp/gap"
	publishMessage(t, p, gap)
	wider.wants(t, "gap")
}

func TestRefusedEventComesAgain(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	publish(t, publisher(t, bus.Config()), "a", "b")
	r := read(t, bus.Config(), events.ConsumerConfig{Durable: "test"}, func(d events.Delivery) error {
		if d.ID == "a" && d.Attempt < 3 {
			return errors.New("not now")
		}
		return nil
	})
	r.wants(t, "b", "a")
}

func TestDurableGoesOnAfterStop(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	p := publisher(t, bus.Config())
	publish(t, p, "a", "b")
	first := read(t, bus.Config(), events.ConsumerConfig{Durable: "test"}, nil)
	first.wants(t, "a", "b")
	first.stop()
	publish(t, p, "c")
	read(t, bus.Config(), events.ConsumerConfig{Durable: "test"}, nil).wants(t, "c")
}

func TestBusRestartKeepsEverything(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	p := publisher(t, bus.Config())
	r := read(t, bus.Config(), events.ConsumerConfig{Durable: "test"}, nil)
	tail := read(t, bus.Config(), events.ConsumerConfig{AllNodes: true}, nil)
	publish(t, p, "a", "b")
	r.wants(t, "a", "b")
	tail.wants(t, "a", "b")
	bus.Stop()
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := p.Publish(short, envelope(t, "lost")); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("without a bus: got %v, want unavailable", err)
	}
	bus.Start()
	publish(t, p, "b", "c")
	r.wants(t, "a", "b", "c")
	tail.wants(t, "a", "b", "c")
}

func TestConsumerSaysWhetherItIsConnected(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	var connected atomic.Bool
	want := func(up bool) {
		t.Helper()
		testkit.Eventually(t, limit, func() error {
			if connected.Load() != up {
				return fmt.Errorf("connected: got %v, want %v", !up, up)
			}
			return nil
		})
	}
	connected.Store(true)
	read(t, bus.Config(), events.ConsumerConfig{Durable: "test", Connected: connected.Store}, nil)
	want(false)
	bus.Start()
	want(true)
	bus.Stop()
	want(false)
	bus.Start()
	want(true)
}

func TestWipedStoreBeginsAnew(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	p := publisher(t, bus.Config())
	r := read(t, bus.Config(), events.ConsumerConfig{Durable: "test"}, nil)
	tail := read(t, bus.Config(), events.ConsumerConfig{AllNodes: true, New: true}, nil)
	testkit.Eventually(t, limit, func() error { return consumers(t, bus, 2) })
	publish(t, p, "a", "b", "c")
	r.wants(t, "a", "b", "c")
	tail.wants(t, "a", "b", "c")
	bus.Stop()
	bus.Wipe()
	bus.Start()
	publish(t, p, "d")
	r.wants(t, "a", "b", "c", "d")
	tail.wants(t, "a", "b", "c", "d")
}

func TestDeletedConsumerIsMadeAgain(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	p := publisher(t, bus.Config())
	publish(t, p, "a", "b")
	r := read(t, bus.Config(), events.ConsumerConfig{Durable: "test"}, nil)
	r.wants(t, "a", "b")
	bus.With(func(js jetstream.JetStream) error {
		return js.DeleteConsumer(t.Context(), events.DefaultStream, "test-node-1")
	})
	publish(t, p, "c")
	r.wants(t, "a", "b", "c")
}

func TestLateBus(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	p := publisher(t, bus.Config())
	r := read(t, bus.Config(), events.ConsumerConfig{Durable: "test"}, nil)
	published := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		published <- p.Publish(ctx, envelope(t, "a"))
	}()
	time.Sleep(300 * time.Millisecond)
	bus.Start()
	if err := <-published; err != nil {
		// The stream may have come a moment later than the server.
		publish(t, p, "a")
	}
	r.wants(t, "a")
}

func TestSpanOfConsumerIsLinked(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	tel, spans := testkit.Telemetry(t)
	p, err := events.NewPublisher(bus.Config(), tel)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	origin, span := tel.Tracer.Start(t.Context(), "origin")
	span.End()
	m := envelope(t, "a")
	m.TraceContext = events.TraceContext(origin)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if err := p.Publish(ctx, m); err != nil {
		t.Fatal(err)
	}
	err = events.Consume(ctx, bus.Config(), tel, events.ConsumerConfig{}, func(context.Context, events.Delivery) error {
		cancel()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	produced, consumed := spans.Named("events.publish"), spans.Named("events.consume")
	if len(produced) != 1 || len(consumed) != 1 {
		t.Fatalf("%d and %d spans", len(produced), len(consumed))
	}
	if produced[0].Parent().SpanID() != span.SpanContext().SpanID() {
		t.Error("the publication does not continue the trace of the event's origin")
	}
	links := consumed[0].Links()
	if len(links) != 1 || links[0].SpanContext.SpanID() != produced[0].SpanContext().SpanID() {
		t.Errorf("links are %v", links)
	}
	if consumed[0].Parent().IsValid() {
		t.Error("the consumer's span has a parent")
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	p := publisher(t, events.DefaultClientConfig())
	for name, m := range map[string]events.Message{
		"no id":    {Topic: "/a"},
		"no topic": {ID: "a"},
		"garbage":  {ID: "a", Topic: "/a", Envelope: []byte{0xff, 0xff}},
	} {
		if err := p.Publish(t.Context(), m); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	tel, _ := testkit.Telemetry(t)
	if _, err := events.NewPublisher(events.ClientConfig{URL: "nowhere"}, tel); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("bad address: got %v", err)
	}
	both := events.ConsumerConfig{New: true, StartSeq: 3}
	if err := events.Consume(t.Context(), events.DefaultClientConfig(), tel, both, nil); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("contradiction: got %v", err)
	}
}

func TestMissingSeedIsUnavailable(t *testing.T) {
	t.Parallel()
	bus := testkit.NewBus(t)
	bus.Start()
	cfg := bus.Config()
	cfg.NkeySeedFile = filepath.Join(t.TempDir(), "not.yet")
	cfg.PublishTimeout = config.Duration(100 * time.Millisecond)
	if err := publisher(t, cfg).Publish(t.Context(), envelope(t, "a")); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("got %v, want unavailable", err)
	}
}
