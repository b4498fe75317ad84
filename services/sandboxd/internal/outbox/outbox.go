// Package outbox carries events from sandboxd's records to the bus.
//
// Events are written in the same transaction as the record they tell of, and relayed here
// in that order: an event leaves the outbox only after the stream has acknowledged it, so
// it is delivered at least once, and the stream drops second copies by message id. The bus
// may be away for any time. An outbox over its limit loses the oldest events that need not
// be kept first, counts them and says so in a gap event at their place.
package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/containerd/typeurl/v2"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// TopicGap is the topic of the event that stands for dropped ones.
const TopicGap = "/crisp/gap"

const (
	batchSize  = 64
	retryFirst = 100 * time.Millisecond
	retryMost  = 5 * time.Second
)

// Publish hands one event to the bus and returns after the stream has it.
type Publish func(ctx context.Context, e *recordv1.Event) error

// Relay drains the outbox. Run it once.
type Relay struct {
	store   *store.Store
	publish Publish
	limit   int
	log     *slog.Logger

	published prometheus.Counter
	failures  prometheus.Counter
	dropped   prometheus.Counter
}

// New returns a relay that keeps at most limit events while the bus is away.
func New(st *store.Store, publish Publish, limit int, log *slog.Logger, reg prometheus.Registerer) *Relay {
	r := &Relay{
		store: st, publish: publish, limit: limit, log: log,
		published: prometheus.NewCounter(prometheus.CounterOpts{Name: "crisp_sandboxd_outbox_published_total", Help: "Events that the stream has acknowledged."}),
		failures:  prometheus.NewCounter(prometheus.CounterOpts{Name: "crisp_sandboxd_outbox_publish_failures_total", Help: "Attempts to publish that failed and were repeated."}),
		dropped:   prometheus.NewCounter(prometheus.CounterOpts{Name: "crisp_sandboxd_outbox_dropped_total", Help: "Events dropped because the outbox was full."}),
	}
	reg.MustRegister(r.published, r.failures, r.dropped,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "crisp_sandboxd_outbox_events", Help: "Events that wait for the bus."},
			func() float64 { return float64(st.EventCount()) }))
	return r
}

// Run relays until ctx ends.
func (r *Relay) Run(ctx context.Context) error {
	delay := retryFirst
	for {
		n, err := r.drain(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // told to stop; what was not published stays in the outbox
		}
		switch {
		case err != nil:
			r.failures.Inc()
			if delay == retryFirst {
				r.log.WarnContext(ctx, "events wait for the bus", slog.Any("error", err))
			}
			r.trim(ctx)
			if !pause.For(ctx, delay) {
				return nil
			}
			delay = min(2*delay, retryMost)
			continue
		case delay != retryFirst:
			r.log.InfoContext(ctx, "events reach the bus again")
		}
		delay = retryFirst
		if n == batchSize {
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-r.store.Appended():
		}
	}
}

// drain publishes one batch in order and drops what was acknowledged.
func (r *Relay) drain(ctx context.Context) (int, error) {
	entries, err := r.store.Events(batchSize)
	if err != nil {
		return 0, err
	}
	var done []uint64
	var failure error
	for _, e := range entries {
		if e.Event != nil {
			failure = r.publish(ctx, e.Event)
			if failure != nil {
				break
			}
			r.published.Inc()
		}
		done = append(done, e.Sequence)
	}
	if len(done) > 0 {
		err = r.store.DropEvents(context.WithoutCancel(ctx), done)
		if err != nil {
			return 0, err
		}
	}
	return len(entries), failure
}

// trim brings an outbox over its limit back to it: the oldest events that need not be kept
// go first, then the oldest of all. The first dropped entry's place is taken by a gap event.
func (r *Relay) trim(ctx context.Context) {
	over := r.store.EventCount() - r.limit
	if over <= 0 {
		return
	}
	entries, err := r.store.Events(r.limit + over)
	if err != nil {
		return
	}
	victims := victims(entries, over+1)
	gap, err := gapEvent(uint64(len(victims)), victims[0])
	if err != nil {
		return
	}
	err = r.store.ReplaceEvents(ctx, victims, gap)
	if err != nil {
		r.log.WarnContext(ctx, "outbox is over its limit and cannot be trimmed", slog.Any("error", err))
		return
	}
	r.dropped.Add(float64(len(victims)))
	r.log.WarnContext(ctx, "outbox is full, events dropped", slog.Int("dropped", len(victims)))
}

func victims(entries []store.Entry, n int) []uint64 {
	var out []uint64
	for _, keep := range []bool{false, true} {
		for _, e := range entries {
			if len(out) == n {
				return out
			}
			if e.Event.GetKeep() == keep {
				out = append(out, e.Sequence)
			}
		}
	}
	return out
}

func gapEvent(dropped, at uint64) (*recordv1.Event, error) {
	payload, err := typeurl.MarshalAny(&eventv1.Gap{Dropped: dropped})
	if err != nil {
		return nil, err
	}
	env, err := proto.Marshal(&types.Envelope{
		Timestamp: timestamppb.Now(), Topic: TopicGap,
		Event: &anypb.Any{TypeUrl: payload.GetTypeUrl(), Value: payload.GetValue()},
	})
	if err != nil {
		return nil, err
	}
	return &recordv1.Event{Topic: TopicGap, MessageId: fmt.Sprintf("gap-%d-%d", at, dropped), Envelope: env, Keep: true}, nil
}
