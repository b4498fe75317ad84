package join

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// debt is an end that a plugin has not been told.
type debt struct {
	object.Object

	// stopOnly is set if the object has ended and is still there.
	stopOnly bool
}

// owedStops are the stops of containers that have ended, and are still there, of which the
// plugin knew that they ran. The others it is not told of.
func (j *Joiner) owedStops(m *member.Member, ended []string) (debts []debt) {
	away := j.parts.Roster.Away(m.Info.ID)
	for _, id := range ended {
		o, there := j.parts.Objects.Get(id)
		switch {
		case !there || o.Container == nil: // a pod is stopped by whoever wants it gone
		case away[id] == object.Known:
			m.Learn(id, object.Known)
			debts = append(debts, debt{Object: o, stopOnly: true})
		case m.StageOf(id) == 0:
			m.Learn(id, object.Stopped)
		default:
		}
	}
	return debts
}

// owed is what a plugin that comes back does not know yet: objects that it was told of and
// that are gone. What is still there it knows as far as it was told. listed are the
// objects of the inventory and those that are being made.
func (j *Joiner) owed(m *member.Member, listed map[string]bool) []debt {
	var debts []debt
	for id, told := range j.parts.Roster.Away(m.Info.ID) {
		switch {
		case told == object.Removed:
		case listed[id]:
			m.Learn(id, told)
		default:
			o, ok := j.parts.Objects.Get(id)
			if !ok {
				continue // from before what is remembered; the plugin would not know it either
			}
			m.Learn(id, told)
			debts = append(debts, debt{Object: o})
		}
	}
	// Containers before their pods; else in a fixed order.
	slices.SortFunc(debts, func(a, b debt) int {
		if (a.Container == nil) != (b.Container == nil) {
			if a.Container == nil {
				return 1
			}
			return -1
		}
		return cmp.Compare(a.ID(), b.ID())
	})
	return debts
}

// settleDebts tells a plugin of the ends that it has missed, while it has its own turn.
func (j *Joiner) settleDebts(ctx context.Context, m *member.Member, debts []debt) (wishes []member.Wish) {
	for _, d := range debts {
		gone := d.Slim()
		pod, container := gone.Pod, gone.Container
		stop, remove := member.Event{Kind: nri.Event_STOP_POD_SANDBOX, Pod: d.ID()}, member.Event{Kind: nri.Event_REMOVE_POD_SANDBOX, Pod: d.ID()}
		stop.Req, remove.Req = proto.Message(&nri.StopPodSandboxRequest{Pod: pod}), proto.Message(&nri.RemovePodSandboxRequest{Pod: pod})
		if container != nil {
			stop = member.Event{Kind: nri.Event_STOP_CONTAINER, Pod: pod.GetId(), Container: d.ID(), Req: &nri.StopContainerRequest{Pod: pod, Container: container}}
			remove = member.Event{Kind: nri.Event_REMOVE_CONTAINER, Pod: pod.GetId(), Container: d.ID(), Req: &nri.RemoveContainerRequest{Pod: pod, Container: container}}
		}
		missed := []member.Event{stop, remove}
		if d.stopOnly {
			missed = missed[:1]
		}
		for _, e := range missed {
			w, err := j.parts.Caller.Deliver(ctx, m, e, nil)
			if err != nil && (errors.Is(err, plug.ErrLost) || ctx.Err() != nil) {
				return wishes
			}
			wishes = append(wishes, w)
		}
	}
	if len(debts) > 0 {
		j.parts.Log.InfoContext(ctx, "plugin told of what has ended while it was away",
			slog.String("plugin", m.Info.ID.String()), slog.Int("objects", len(debts)))
	}
	return wishes
}
