// Package audit keeps the trail of what plugins change: in the log, and on the bus under
// nri.audit.
//
// A record never holds a request up: it is written a moment later, when the request that it
// belongs to has the processors no longer to share. What the bus does not take at once waits
// in a bounded queue; what does not fit is counted and is in the log alone.
package audit

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/containerd/containerd/api/types"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/typeurl/v2"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/change"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
)

const (
	// Topic is the topic of the trail on the bus.
	Topic = "/nri/audit"
	// namespace is that of the kubelet's pods in containerd's events.
	namespace = "k8s.io"

	queueLength = 4096
	retryPause  = time.Second
	// settle is how long records wait, so that those that come together are written together.
	settle = 20 * time.Millisecond
	// farewell is how long the end waits for the bus to take what is left.
	farewell = time.Second
)

// Config says where the trail goes and what is in it.
type Config struct {
	Log    bool // write it to the log
	Values bool // with old and new values
}

// Publisher takes events; see events.Publisher.
type Publisher interface {
	Publish(ctx context.Context, m events.Message) error
}

// Trail is the audit trail. Use New.
type Trail struct {
	cfg     Config
	tel     *telemetry.Telemetry
	bus     Publisher // nil without a bus
	fresh   chan entry
	queue   chan events.Message
	prefix  string
	dropped prometheus.Counter
}

// entry is a record that is still to be written.
type entry struct {
	ctx    context.Context //nolint:containedctx // of the request, whose trace the record belongs to
	record vet.Record
	at     time.Time // when it was recorded
}

// New makes a trail; bus may be nil. Records wait for Run.
func New(cfg Config, tel *telemetry.Telemetry, bus Publisher) (*Trail, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	return &Trail{
		cfg: cfg, tel: tel, bus: bus,
		fresh:  make(chan entry, queueLength),
		queue:  make(chan events.Message, queueLength),
		prefix: "nri-audit-" + hex.EncodeToString(b[:]),
		dropped: telemetry.Register(tel, prometheus.NewCounter(prometheus.CounterOpts{
			Name: "crisp_nri_audit_dropped_total",
			Help: "Records of the audit trail that the bus did not take in time.",
		})),
	}, nil
}

// Record takes a record. It does not block and may be called concurrently. More records than
// fit are written at once, and to the log alone.
func (t *Trail) Record(ctx context.Context, r vet.Record) {
	select {
	case t.fresh <- entry{context.WithoutCancel(ctx), r, time.Now()}:
	default:
		t.log(ctx, r)
		if t.bus != nil {
			t.dropped.Inc()
		}
	}
}

// Run writes the records to the log, and hands them to the bus, in order, until ctx ends. What
// is there by then is in the log when it returns, and on the bus if that takes it soon.
func (t *Trail) Run(ctx context.Context) {
	busCtx, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	written := make(chan struct{})
	var publisher sync.WaitGroup
	publisher.Go(func() { t.serveBus(busCtx, written) })
	t.serveLog(ctx)
	close(written)
	defer time.AfterFunc(farewell, giveUp).Stop()
	publisher.Wait()
}

// serveLog writes the records until ctx ends, and all that are there by then.
func (t *Trail) serveLog(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			t.write()
			return
		case e := <-t.fresh:
			pause.For(ctx, settle)
			t.keep(e)
			t.write()
		}
	}
}

// write writes all records that are there.
func (t *Trail) write() {
	for {
		select {
		case e := <-t.fresh:
			t.keep(e)
		default:
			return
		}
	}
}

// keep writes a record to the log and leaves it to the bus.
func (t *Trail) keep(e entry) {
	t.log(e.ctx, e.record)
	if t.bus == nil {
		return
	}
	m, err := t.message(e)
	if err != nil {
		t.tel.Log.WarnContext(e.ctx, "audit record not encoded", slog.Any("error", err))
		return
	}
	select {
	case t.queue <- m:
	default:
		t.dropped.Inc()
	}
}

// serveBus hands what is meant for the bus to it until ctx ends, or until there is nothing left
// after everything is written.
func (t *Trail) serveBus(ctx context.Context, written <-chan struct{}) {
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-t.queue:
			t.publish(ctx, m)
			continue
		case <-written:
		}
		select {
		case m := <-t.queue:
			t.publish(ctx, m)
		default:
			return
		}
	}
}

// publish repeats until the bus has the record; the id keeps a repetition from counting
// twice.
func (t *Trail) publish(ctx context.Context, m events.Message) {
	for ctx.Err() == nil {
		err := t.bus.Publish(ctx, m)
		if err == nil || ctx.Err() != nil {
			return
		}
		t.tel.Log.DebugContext(ctx, "audit record not published yet", slog.Any("error", err))
		pause.For(ctx, retryPause)
	}
}

// log writes one line for each change, so that a line can be found by field and value.
func (t *Trail) log(ctx context.Context, r vet.Record) {
	if !t.cfg.Log {
		return
	}
	common := []slog.Attr{
		slog.String("plugin", r.Plugin.String()),
		slog.String("request", requestOf(r)),
		slog.String("pod", r.Pod.GetNamespace()+"/"+r.Pod.GetName()),
		slog.String("container_id", r.Container.GetId()),
		slog.String("container", r.Container.GetName()),
		slog.Duration("latency", r.Latency),
	}
	if r.Refused != "" {
		common = append(common, slog.String("refused", r.Refused))
	}
	if r.Error != "" {
		t.tel.Log.LogAttrs(ctx, slog.LevelInfo, "nri audit: plugin failed", append(common, slog.String("error", r.Error))...)
	}
	for _, c := range t.changes(r) {
		attrs := append(slices.Clip(common), slog.String("field", c.Field), slog.String("key", c.Key),
			slog.String("old", c.Old), slog.String("new", c.New), slog.Bool("removed", c.Removed))
		t.tel.Log.LogAttrs(ctx, slog.LevelInfo, "nri audit: plugin changed a container", attrs...)
	}
}

// changes are those of a record, with values only if they may be told.
func (t *Trail) changes(r vet.Record) []change.Change {
	if t.cfg.Values {
		return r.Changes
	}
	told := slices.Clone(r.Changes)
	for i := range told {
		told[i].Old, told[i].New = "", ""
	}
	return told
}

func requestOf(r vet.Record) string {
	if r.Event == nri.Event_UNKNOWN {
		return "" // by itself
	}
	return r.Event.PrettyName()
}

func (t *Trail) message(e entry) (events.Message, error) {
	r := e.record
	audit := &eventv1.PluginAudit{
		Plugin:        r.Plugin.String(),
		Request:       requestOf(r),
		PodNamespace:  r.Pod.GetNamespace(),
		PodName:       r.Pod.GetName(),
		PodId:         r.Pod.GetId(),
		ContainerId:   r.Container.GetId(),
		ContainerName: r.Container.GetName(),
		LatencyNano:   int64(r.Latency),
		Refused:       r.Refused,
		Error:         r.Error,
	}
	for _, c := range t.changes(r) {
		audit.Changes = append(audit.Changes, &eventv1.FieldChange{
			Field: c.Field, Key: c.Key, OldValue: c.Old, NewValue: c.New, Removed: c.Removed,
		})
	}
	payload, err := typeurl.MarshalAny(audit)
	if err != nil {
		return events.Message{}, err
	}
	envelope, err := proto.Marshal(&types.Envelope{
		Timestamp: timestamppb.New(e.at),
		Namespace: namespace,
		Topic:     Topic,
		Event:     &anypb.Any{TypeUrl: payload.GetTypeUrl(), Value: payload.GetValue()},
	})
	if err != nil {
		return events.Message{}, err
	}
	id, err := t.id()
	return events.Message{ID: id, Topic: Topic, Namespace: namespace, Envelope: envelope, TraceContext: events.TraceContext(e.ctx)}, err
}

func (t *Trail) id() (string, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", err
	}
	return t.prefix + "-" + hex.EncodeToString(b[:]), nil
}
