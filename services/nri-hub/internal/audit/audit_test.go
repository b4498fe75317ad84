package audit_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/audit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/change"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
)

func record() vet.Record {
	return vet.Record{
		Plugin:    plug.ID{Index: "10", Name: "a"},
		Event:     nri.Event_CREATE_CONTAINER,
		Pod:       &nri.PodSandbox{Id: "p", Name: "web", Namespace: "default"},
		Container: &nri.Container{Id: "c", Name: "main"},
		Changes:   []change.Change{{Field: "env", Key: "TOKEN", Old: "x", New: "secret"}},
		Latency:   time.Millisecond,
	}
}

// A record reaches the bus once it is there, under nri.audit.
func TestTrailReachesTheBus(t *testing.T) {
	t.Parallel()
	for name, values := range map[string]bool{"with values": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tel, _ := testkit.Telemetry(t)
			bus := testkit.NewBus(t)
			pub, err := events.NewPublisher(bus.Config(), tel)
			if err != nil {
				t.Fatal(err)
			}
			defer pub.Close()
			trail, err := audit.New(audit.Config{Values: values}, tel, pub)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var run sync.WaitGroup
			run.Go(func() { trail.Run(ctx) })
			trail.Record(t.Context(), record()) // while there is no bus
			bus.Start()
			var got *eventv1.PluginAudit
			testkit.Eventually(t, testkit.Patience, func() error {
				var failure error
				bus.With(func(js jetstream.JetStream) error {
					got, failure = last(t.Context(), js)
					return nil
				})
				return failure
			})
			cancel()
			run.Wait()
			c := got.GetChanges()
			if got.GetPlugin() != "10-a" || got.GetRequest() != "CreateContainer" || got.GetPodName() != "web" ||
				got.GetContainerName() != "main" || got.GetLatencyNano() != int64(time.Millisecond) || len(c) != 1 || c[0].GetKey() != "TOKEN" {
				t.Errorf("record is %v", got)
			}
			if shown := c[0].GetNewValue() == "secret" && c[0].GetOldValue() == "x"; shown != values || !values && c[0].GetNewValue() != "" {
				t.Errorf("values are told: %v", c[0])
			}
		})
	}
}

func last(ctx context.Context, js jetstream.JetStream) (*eventv1.PluginAudit, error) {
	s, err := js.Stream(ctx, events.DefaultStream)
	if err != nil {
		return nil, err
	}
	m, err := s.GetLastMsgForSubject(ctx, "crisp.v1.node-1.k8s_io.nri.audit")
	if err != nil {
		return nil, err
	}
	var envelope types.Envelope
	var a eventv1.PluginAudit
	if err := proto.Unmarshal(m.Data, &envelope); err != nil {
		return nil, err
	}
	if envelope.GetTopic() != audit.Topic {
		return nil, fmt.Errorf("topic is %q", envelope.GetTopic())
	}
	return &a, proto.Unmarshal(envelope.GetEvent().GetValue(), &a)
}

// Whatever was recorded is in the log when the trail has ended, in order and with a bus that takes
// nothing.
func TestTrailIsInTheLogAtItsEnd(t *testing.T) {
	t.Parallel()
	const records = 100
	var log strings.Builder
	tel, _ := testkit.TelemetryTo(t, &log)
	trail, err := audit.New(audit.Config{Log: true, Values: true}, tel, never{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range records {
		r := record()
		r.Changes[0].New = fmt.Sprintf("number-%d.", i)
		trail.Record(t.Context(), r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	trail.Run(ctx)
	rest := log.String()
	for i := range records {
		_, after, found := strings.Cut(rest, fmt.Sprintf("number-%d.", i))
		if !found {
			t.Fatalf("record %d is not in the log, or not in its place:\n%s", i, &log)
		}
		rest = after
	}
}

// Without a reader nothing is held up and nothing grows without bound.
func TestTrailNeverBlocks(t *testing.T) {
	t.Parallel()
	tel, _ := testkit.Telemetry(t)
	trail, err := audit.New(audit.Config{}, tel, never{})
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for range 5000 {
		trail.Record(t.Context(), record())
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
	families, err := tel.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "crisp_nri_audit_dropped_total" && f.GetMetric()[0].GetCounter().GetValue() != 5000-4096 {
			t.Errorf("dropped are %v", f.GetMetric())
		}
	}
}

// What the bus is told has the time of the change, not of its writing.
func TestTrailTellsWhenItWasRecorded(t *testing.T) {
	t.Parallel()
	tel, _ := testkit.Telemetry(t)
	bus := make(taken, 1)
	trail, err := audit.New(audit.Config{}, tel, bus)
	if err != nil {
		t.Fatal(err)
	}
	trail.Record(t.Context(), record())
	recorded := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	defer run.Wait()
	defer cancel()
	run.Go(func() { trail.Run(ctx) })
	var envelope types.Envelope
	if err := proto.Unmarshal((<-bus).Envelope, &envelope); err != nil {
		t.Fatal(err)
	}
	if at := envelope.GetTimestamp().AsTime(); at.After(recorded) {
		t.Errorf("recorded before %v, told as %v", recorded, at)
	}
}

// An end in good order leaves nothing behind that the bus would have taken.
func TestTrailIsOnTheBusAtItsEnd(t *testing.T) {
	t.Parallel()
	const records = 100
	tel, _ := testkit.Telemetry(t)
	bus := make(taken, records)
	trail, err := audit.New(audit.Config{}, tel, bus)
	if err != nil {
		t.Fatal(err)
	}
	for range records {
		trail.Record(t.Context(), record())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	trail.Run(ctx)
	if len(bus) != records {
		t.Errorf("the bus has %d records, want %d", len(bus), records)
	}
}

// taken is a bus that takes all there is room for.
type taken chan events.Message

func (t taken) Publish(_ context.Context, m events.Message) error { t <- m; return nil }

type never struct{}

func (never) Publish(ctx context.Context, _ events.Message) error { <-ctx.Done(); return ctx.Err() }
