package dispatch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/call"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/sound"
)

// take lets an answer through as far as the plugin's rule allows, gives it to the request
// and records it. One with values that cannot be is a failure of the plugin.
func (d *Dispatcher) take(ctx context.Context, r *Request, m *member.Member, resp proto.Message, took time.Duration) error {
	if resp == nil || r.Take == nil {
		return nil
	}
	w := vet.Of(resp)
	if err := sound.Answer(w.Adjust, *w.Updates, *w.Evict); err != nil {
		return d.failed(ctx, r, m, &plug.Error{Plugin: m.Info.ID, Event: r.Event, Err: fmt.Errorf("answer that cannot be: %w", err)})
	}
	var before *nri.LinuxResources
	if u, ok := r.Message().(*nri.UpdateContainerRequest); ok {
		before = u.GetLinuxResources()
	}
	view := r.Container
	if c, ok := r.Message().(*nri.CreateContainerRequest); ok {
		view = c.GetContainer()
	}
	keep := func(ctx context.Context, rec vet.Record) { d.record(ctx, r, rec) }
	about := vet.Subject{Event: r.Event, Pod: r.Pod, Container: view, Before: before, Took: took, Keep: keep}
	records, err := d.parts.Vet.Check(ctx, m, about, w, r.Tolerant)
	refused := ""
	switch {
	case m.Rule.Observe:
		refused, err = vet.Observing, nil
	case err == nil:
		err = r.Take(m.Info.ID, resp)
	}
	if err != nil {
		refused = err.Error()
	} else if refused == "" && r.Dry != nil {
		refused = vet.DryRun
	}
	for _, rec := range records {
		rec.Refused = refused
		d.record(ctx, r, rec)
	}
	return err
}

// record gives a record to the audit trail, or to who looks at a rehearsal.
func (d *Dispatcher) record(ctx context.Context, r *Request, rec vet.Record) {
	if r.Dry != nil {
		r.Dry.Records = append(r.Dry.Records, rec)
		return
	}
	d.parts.Vet.Record(ctx, rec)
}

// failed decides what a plugin's failure means for the request.
func (d *Dispatcher) failed(ctx context.Context, r *Request, m *member.Member, err error) error {
	perr, ok := errors.AsType[*plug.Error](err)
	if !ok {
		return err
	}
	d.record(ctx, r, vet.Record{Plugin: m.Info.ID, Event: r.Event, Pod: r.Pod, Container: r.Container, Error: perr.Err.Error()})
	unanswered := errors.Is(err, plug.ErrLost) || errors.Is(err, call.ErrTimeout)
	if unanswered && !r.Tolerant {
		if m.Info.Policy.GetFailRequest() && !m.Rule.Observe {
			return err
		}
		if err := missed(r, m, err); err != nil {
			return err
		}
	}
	if !unanswered && !r.Tolerant && !m.Rule.Observe {
		return err
	}
	d.parts.Log.WarnContext(ctx, "request goes on without the plugin", slog.String("plugin", m.Info.ID.String()),
		slog.String("event", r.Event.PrettyName()), slog.Any("error", err))
	return nil
}
