package hub

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/change"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// Record is one entry of the audit trail: what a plugin's answer, or the plugin by itself,
// changes of one container, or why it does not.
type Record struct {
	Plugin    plug.ID
	Event     nri.Event       // UNKNOWN for what the plugin asked for by itself
	Pod       *nri.PodSandbox // nil if it is not known
	Container *nri.Container  // nil if it is about a pod alone; perhaps with an id only
	Changes   []change.Change
	Latency   time.Duration // of the answer
	// Refused says why the changes do not count; empty if they do.
	Refused string
	// Error is the failure of a call that changed nothing.
	Error string
}

// Why the changes of an answer do not count.
const (
	observing   = "the plugin only observes"
	unpermitted = "not permitted by the plugin's rights"
	dryRun      = "dry run"
)

func (h *Hub) record(ctx context.Context, r Record) {
	if h.Audit != nil && (len(r.Changes) > 0 || r.Error != "") {
		h.Audit(ctx, r)
	}
}

// wanted is what a plugin wants, in an answer or by itself. The lists are changed in place.
type wanted struct {
	adjust  *nri.ContainerAdjustment
	updates *[]*nri.ContainerUpdate
	evict   *[]*nri.ContainerEviction
}

func wantedOf(resp proto.Message) wanted {
	w := wanted{updates: new([]*nri.ContainerUpdate), evict: new([]*nri.ContainerEviction)}
	switch r := resp.(type) {
	case *nri.CreateContainerResponse:
		w = wanted{r.GetAdjust(), &r.Update, &r.Evict}
	case *nri.UpdateContainerResponse:
		w.updates, w.evict = &r.Update, &r.Evict
	case *nri.StopContainerResponse:
		w.updates = &r.Update
	}
	return w
}

// take lets an answer through as far as the plugin's rule allows, gives it to the request
// and records it.
func (h *Hub) take(ctx context.Context, r *request, m *member, resp proto.Message, took time.Duration) error {
	if resp == nil || r.take == nil {
		return nil
	}
	w := wantedOf(resp)
	var before *nri.LinuxResources
	if u, ok := r.message().(*nri.UpdateContainerRequest); ok {
		before = u.GetLinuxResources()
	}
	view := r.container
	if c, ok := r.message().(*nri.CreateContainerRequest); ok {
		view = c.GetContainer()
	}
	about := subject{request: r, event: r.event, pod: r.pod, container: view, before: before, took: took}
	records, err := h.vet(ctx, m, about, w, r.tolerant)
	refused := ""
	switch {
	case m.rule.Observe:
		refused, err = observing, nil
	case err == nil:
		err = r.take(m.info.ID, resp)
	}
	if err != nil {
		refused = err.Error()
	} else if refused == "" && r.dry != nil {
		refused = dryRun
	}
	for _, rec := range records {
		rec.Refused = refused
		h.keepRecord(ctx, r, rec)
	}
	return err
}

// keepRecord gives a record to the audit trail, or to who looks at a rehearsal.
func (h *Hub) keepRecord(ctx context.Context, r *request, rec Record) {
	if r.dry != nil {
		r.dry.records = append(r.dry.records, rec)
		return
	}
	h.record(ctx, rec)
}

// subject is what a plugin was asked about; container is as the plugin saw it.
type subject struct {
	request   *request // nil for what a plugin wants by itself
	event     nri.Event
	pod       *nri.PodSandbox
	container *nri.Container
	before    *nri.LinuxResources
	took      time.Duration
}

// vet checks what a plugin wants against its rights. What is not allowed is taken out and
// recorded, if the rights say so or the request must go on; else it is an error. The
// returned records are those of what is left.
func (h *Hub) vet(ctx context.Context, m *member, about subject, w wanted, tolerant bool) ([]Record, error) {
	v := vetting{hub: h, member: m, about: about, rights: m.rule.Rights, strip: tolerant || m.rule.Rights.Strip || m.rule.Observe}
	if w.adjust != nil {
		v.part(ctx, about.pod, about.container, change.Of(about.container, w.adjust), func(keep func(string) bool) {
			change.Strip(w.adjust, keep)
		})
	}
	for _, u := range *w.updates {
		pod, c := about.pod, about.container
		var before *nri.LinuxResources
		if u.GetContainerId() == c.GetId() && c.GetId() != "" {
			before = about.before
		} else {
			pod, c = h.podOf(u.GetContainerId()), &nri.Container{Id: u.GetContainerId()}
		}
		v.part(ctx, pod, c, change.OfResources(before, u.GetLinux().GetResources()), func(keep func(string) bool) {
			change.StripResources(u.GetLinux().GetResources(), keep)
		})
	}
	*w.evict = slices.DeleteFunc(*w.evict, func(e *nri.ContainerEviction) bool {
		out := false
		v.part(ctx, h.podOf(e.GetContainerId()), &nri.Container{Id: e.GetContainerId()},
			[]change.Change{{Field: change.Evict, New: e.GetReason()}}, func(func(string) bool) { out = true })
		return out
	})
	return v.records, v.err
}

// vetting is the check of one answer.
type vetting struct {
	hub     *Hub
	member  *member
	about   subject
	rights  rule.Rights
	strip   bool
	records []Record
	err     error
}

// part checks what is wanted of one container.
func (v *vetting) part(ctx context.Context, pod *nri.PodSandbox, c *nri.Container, changes []change.Change, strip func(keep func(string) bool)) {
	mayTouch := v.rights.Pods.All() || pod != nil && v.rights.Pods.Match(pod)
	keep := func(field string) bool { return mayTouch && v.rights.MayChange(field) }
	rec := Record{Plugin: v.member.info.ID, Event: v.about.event, Pod: pod, Container: c, Latency: v.about.took}
	denied := rec
	for _, ch := range changes {
		if keep(ch.Field) {
			rec.Changes = append(rec.Changes, ch)
		} else {
			denied.Changes = append(denied.Changes, ch)
		}
	}
	if len(rec.Changes) > 0 {
		v.records = append(v.records, rec)
	}
	if len(denied.Changes) == 0 {
		return
	}
	denied.Refused = unpermitted
	if v.about.request != nil {
		v.hub.keepRecord(ctx, v.about.request, denied)
	} else {
		v.hub.record(ctx, denied)
	}
	field := denied.Changes[0].Field
	v.hub.Log.WarnContext(ctx, "plugin wants what it may not", slog.String("plugin", v.member.info.ID.String()),
		slog.String("field", field), slog.String("container_id", c.GetId()), slog.String("namespace", pod.GetNamespace()))
	if v.strip {
		strip(keep)
		return
	}
	if v.err == nil {
		v.err = fmt.Errorf("plugin %q may not change %s of container %q (namespace %q): %w",
			v.member.info.ID, field, c.GetId(), pod.GetNamespace(), errdefs.ErrPermissionDenied)
	}
}

// podOf is the pod of a container, nil if it is not known.
func (h *Hub) podOf(container string) *nri.PodSandbox {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.objects[container].pod
}
