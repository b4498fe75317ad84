// Package vet checks what plugins want against what they may, and makes the records of it
// for the audit trail.
//
// It changes answers in place where something is taken out of them, and decides nothing else.
package vet

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
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
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
	Observing   = "the plugin only observes"
	DryRun      = "dry run"
	unpermitted = "not permitted by the plugin's rights"
)

// Wanted is what a plugin wants, in an answer or by itself. The lists are changed in place.
type Wanted struct {
	Adjust  *nri.ContainerAdjustment
	Updates *[]*nri.ContainerUpdate
	Evict   *[]*nri.ContainerEviction
}

// Of is what an answer wants.
func Of(resp proto.Message) Wanted {
	w := Wanted{Updates: new([]*nri.ContainerUpdate), Evict: new([]*nri.ContainerEviction)}
	switch r := resp.(type) {
	case *nri.CreateContainerResponse:
		w = Wanted{r.GetAdjust(), &r.Update, &r.Evict}
	case *nri.UpdateContainerResponse:
		w.Updates, w.Evict = &r.Update, &r.Evict
	case *nri.StopContainerResponse:
		w.Updates = &r.Update
	}
	return w
}

// Subject is what a plugin was asked about; it is empty for what a plugin wants by itself.
type Subject struct {
	Event     nri.Event
	Pod       *nri.PodSandbox
	Container *nri.Container      // as the plugin saw it
	Before    *nri.LinuxResources // of a container that is updated
	Took      time.Duration
	// Keep takes the records of what is not allowed; nil stands for the audit trail.
	Keep func(context.Context, Record)
}

// Checker checks. Its fields do not change.
type Checker struct {
	Log     *slog.Logger
	Objects *object.Table
	// Audit takes the records of what plugins change; it must not block. Nil drops them.
	Audit func(ctx context.Context, r Record)
}

// Record gives a record to the audit trail, if there is anything in it.
func (c *Checker) Record(ctx context.Context, r Record) {
	if c.Audit != nil && (len(r.Changes) > 0 || r.Error != "") {
		c.Audit(ctx, r)
	}
}

// Check checks what a plugin wants against its rights. What is not allowed is taken out and
// recorded, if the rights say so or the request must go on (tolerant); else it is an error.
// The returned records are those of what is left.
func (c *Checker) Check(ctx context.Context, m *member.Member, about Subject, w Wanted, tolerant bool) ([]Record, error) {
	if about.Keep == nil {
		about.Keep = c.Record
	}
	v := vetting{
		checker: c, member: m, about: about, rights: m.Rule.Rights,
		strip: tolerant || m.Rule.Rights.Strip || m.Rule.Observe,
	}
	if w.Adjust != nil {
		v.part(ctx, about.Pod, about.Container, change.Of(about.Container, w.Adjust), func(keep func(string) bool) {
			change.Strip(w.Adjust, keep)
		})
	}
	for _, u := range *w.Updates {
		pod, container := about.Pod, about.Container
		var before *nri.LinuxResources
		if u.GetContainerId() == container.GetId() && container.GetId() != "" {
			before = about.Before
		} else {
			pod, container = c.Objects.PodOf(u.GetContainerId()), &nri.Container{Id: u.GetContainerId()}
		}
		v.part(ctx, pod, container, change.OfResources(before, u.GetLinux().GetResources()), func(keep func(string) bool) {
			change.StripResources(u.GetLinux().GetResources(), keep)
		})
	}
	*w.Evict = slices.DeleteFunc(*w.Evict, func(e *nri.ContainerEviction) bool {
		out := false
		v.part(ctx, c.Objects.PodOf(e.GetContainerId()), &nri.Container{Id: e.GetContainerId()},
			[]change.Change{{Field: change.Evict, New: e.GetReason()}}, func(func(string) bool) { out = true })
		return out
	})
	return v.records, v.err
}

// vetting is the check of one answer.
type vetting struct {
	checker *Checker
	member  *member.Member
	about   Subject
	rights  rule.Rights
	strip   bool
	records []Record
	err     error
}

// part checks what is wanted of one container.
func (v *vetting) part(ctx context.Context, pod *nri.PodSandbox, c *nri.Container, changes []change.Change, strip func(keep func(string) bool)) {
	mayTouch := v.rights.Pods.All() || pod != nil && v.rights.Pods.Match(pod)
	keep := func(field string) bool { return mayTouch && v.rights.MayChange(field) }
	rec := Record{Plugin: v.member.Info.ID, Event: v.about.Event, Pod: pod, Container: c, Latency: v.about.Took}
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
	v.about.Keep(ctx, denied)
	field := denied.Changes[0].Field
	v.checker.Log.WarnContext(ctx, "plugin wants what it may not", slog.String("plugin", v.member.Info.ID.String()),
		slog.String("field", field), slog.String("container_id", c.GetId()), slog.String("namespace", pod.GetNamespace()))
	if v.strip {
		strip(keep)
		return
	}
	if v.err == nil {
		v.err = fmt.Errorf("plugin %q may not change %s of container %q (namespace %q): %w",
			v.member.Info.ID, field, c.GetId(), pod.GetNamespace(), errdefs.ErrPermissionDenied)
	}
}
