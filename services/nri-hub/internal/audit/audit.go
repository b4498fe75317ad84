// Package audit keeps the trail of what plugins change: in the log, and on the bus under
// nri.audit.
//
// A record never holds a request up. What the bus does not take at once waits in a
// bounded queue; what does not fit is counted and is in the log alone.
package audit

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
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
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
)

const (
	// Topic is the topic of the trail on the bus.
	Topic = "/nri/audit"
	// namespace is that of the kubelet's pods in containerd's events.
	namespace = "k8s.io"

	queueLength = 4096
	retryPause  = time.Second
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
	queue   chan events.Message
	prefix  string
	dropped prometheus.Counter
}

// New makes a trail; bus may be nil. What is meant for the bus waits for Run.
func New(cfg Config, tel *telemetry.Telemetry, bus Publisher) (*Trail, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	return &Trail{
		cfg: cfg, tel: tel, bus: bus,
		queue:  make(chan events.Message, queueLength),
		prefix: "nri-audit-" + hex.EncodeToString(b[:]),
		dropped: telemetry.Register(tel, prometheus.NewCounter(prometheus.CounterOpts{
			Name: "crisp_nri_audit_dropped_total",
			Help: "Records of the audit trail that the bus did not take in time.",
		})),
	}, nil
}

// Record takes a record. It does not block and may be called concurrently.
func (t *Trail) Record(ctx context.Context, r vet.Record) {
	if !t.cfg.Values {
		r = withoutValues(r)
	}
	if t.cfg.Log {
		t.log(ctx, r)
	}
	if t.bus == nil {
		return
	}
	m, err := t.message(ctx, r)
	if err != nil {
		t.tel.Log.WarnContext(ctx, "audit record not encoded", slog.Any("error", err))
		return
	}
	select {
	case t.queue <- m:
	default:
		t.dropped.Inc()
	}
}

// Run hands the records to the bus, in order, until ctx ends.
func (t *Trail) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-t.queue:
			t.publish(ctx, m)
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

func withoutValues(r vet.Record) vet.Record {
	changes := r.Changes
	r.Changes = nil
	for _, c := range changes {
		c.Old, c.New = "", ""
		r.Changes = append(r.Changes, c)
	}
	return r
}

// log writes one line for each change, so that a line can be found by field and value.
func (t *Trail) log(ctx context.Context, r vet.Record) {
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
	for _, c := range r.Changes {
		attrs := append(slices.Clip(common), slog.String("field", c.Field), slog.String("key", c.Key),
			slog.String("old", c.Old), slog.String("new", c.New), slog.Bool("removed", c.Removed))
		t.tel.Log.LogAttrs(ctx, slog.LevelInfo, "nri audit: plugin changed a container", attrs...)
	}
}

func requestOf(r vet.Record) string {
	if r.Event == nri.Event_UNKNOWN {
		return "" // by itself
	}
	return r.Event.PrettyName()
}

func (t *Trail) message(ctx context.Context, r vet.Record) (events.Message, error) {
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
	for _, c := range r.Changes {
		audit.Changes = append(audit.Changes, &eventv1.FieldChange{
			Field: c.Field, Key: c.Key, OldValue: c.Old, NewValue: c.New, Removed: c.Removed,
		})
	}
	payload, err := typeurl.MarshalAny(audit)
	if err != nil {
		return events.Message{}, err
	}
	envelope, err := proto.Marshal(&types.Envelope{
		Timestamp: timestamppb.Now(),
		Namespace: namespace,
		Topic:     Topic,
		Event:     &anypb.Any{TypeUrl: payload.GetTypeUrl(), Value: payload.GetValue()},
	})
	if err != nil {
		return events.Message{}, err
	}
	id, err := t.id()
	return events.Message{ID: id, Topic: Topic, Namespace: namespace, Envelope: envelope, TraceContext: events.TraceContext(ctx)}, err
}

func (t *Trail) id() (string, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", err
	}
	return t.prefix + "-" + hex.EncodeToString(b[:]), nil
}
