package hub

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

const (
	// maxAway bounds the plugins that are away and whose knowledge is remembered.
	maxAway = 64
	// maxRemains bounds the removed objects of which is remembered what they were, for
	// plugins that still have to hear of their end.
	maxRemains = 8192
)

// Ledger remembers over a restart of the hub which pods and containers each plugin knows,
// so that each of them hears of an object's end once, whoever was away when it came. Its
// methods are called concurrently and do not fail: what is not remembered is an end that
// is not told.
type Ledger interface {
	// Object notes what an object is; the container is nil for a pod.
	Object(pod *nri.PodSandbox, container *nri.Container)
	// Told notes how much of an object a plugin has been told.
	Told(plugin plug.ID, object string, told Told)
}

// Told is how much of an object's life a plugin has been told.
type Told = stage

// The stages of an object's life.
const (
	ToldKnown   = known
	ToldStopped = stopped
	ToldRemoved = removed
)

// Past is what a ledger has remembered.
type Past struct {
	Pods       map[string]*nri.PodSandbox
	Containers map[string]*nri.Container
	Told       map[plug.ID]map[string]Told
}

// recall takes over what was remembered. It is called before the hub is used.
func (h *Hub) recall(past Past) {
	for id, p := range past.Pods {
		h.objects[id] = object{pod: p}
	}
	for id, c := range past.Containers {
		h.objects[id] = object{pod: past.Pods[c.GetPodSandboxId()], container: c}
	}
	for id, told := range past.Told {
		h.away[id] = maps.Clone(told)
		h.awayOrder = append(h.awayOrder, id)
	}
}

// slim is what is remembered of an object: enough to tell of its end.
func slim(o object) (*nri.PodSandbox, *nri.Container) {
	pod := &nri.PodSandbox{
		Id: o.pod.GetId(), Name: o.pod.GetName(), Uid: o.pod.GetUid(), Namespace: o.pod.GetNamespace(),
		Labels: o.pod.GetLabels(), Annotations: o.pod.GetAnnotations(), RuntimeHandler: o.pod.GetRuntimeHandler(),
	}
	if o.container == nil {
		return pod, nil
	}
	c := o.container
	return pod, &nri.Container{
		Id: c.GetId(), PodSandboxId: c.GetPodSandboxId(), Name: c.GetName(), State: nri.ContainerState_CONTAINER_STOPPED,
		Labels: c.GetLabels(), Annotations: c.GetAnnotations(),
	}
}

// depart remembers what a plugin knew that has gone.
func (h *Hub) depart(m *member) {
	open := m.open()
	h.mu.Lock()
	defer h.mu.Unlock()
	id := m.info.ID
	if slices.ContainsFunc(h.members, func(o *member) bool { return o.info.ID == id && o.serves() }) {
		return // a newer instance knows it all
	}
	h.forgetAway(id)
	h.away[id] = open
	h.awayOrder = append(h.awayOrder, id)
	if len(h.awayOrder) > maxAway {
		h.forgetAway(h.awayOrder[0])
	}
}

// forgetAway drops what is remembered of a plugin that is away. The caller holds mu.
func (h *Hub) forgetAway(id plug.ID) {
	delete(h.away, id)
	h.awayOrder = slices.DeleteFunc(h.awayOrder, func(o plug.ID) bool { return o == id })
}

// debt is an end that a plugin has not been told.
type debt struct {
	object

	id string
	// stopOnly is set if the object has ended and is still there.
	stopOnly bool
}

// owedStops are the stops of containers that have ended, and are still there, of which the
// plugin knew that they ran. The others it is not told of.
func (h *Hub) owedStops(m *member, ended []string) (debts []debt) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ended {
		o, there := h.objects[id]
		switch {
		case !there || o.container == nil: // a pod is stopped by whoever wants it gone
		case h.away[m.info.ID][id] == known:
			m.learn(id, known)
			debts = append(debts, debt{object: o, id: id, stopOnly: true})
		case m.stageOf(id) == 0:
			m.learn(id, stopped)
		default:
		}
	}
	return debts
}

// owed is what a plugin that comes back does not know yet: objects that it was told of and
// that are gone. What is still there it knows as far as it was told. listed are the
// objects of the inventory and those that are being made.
func (h *Hub) owed(m *member, listed map[string]bool) []debt {
	h.mu.Lock()
	defer h.mu.Unlock()
	var debts []debt
	for id, told := range h.away[m.info.ID] {
		switch {
		case told == removed:
		case listed[id]:
			m.learn(id, told)
		default:
			o, ok := h.objects[id]
			if !ok {
				continue // from before what is remembered; the plugin would not know it either
			}
			m.learn(id, told)
			debts = append(debts, debt{object: o, id: id})
		}
	}
	// Containers before their pods; else in a fixed order.
	slices.SortFunc(debts, func(a, b debt) int {
		if (a.container == nil) != (b.container == nil) {
			if a.container == nil {
				return 1
			}
			return -1
		}
		if a.id < b.id {
			return -1
		}
		return 1
	})
	return debts
}

// settleDebts tells a plugin of the ends that it has missed, while it has its own turn.
func (h *Hub) settleDebts(ctx context.Context, m *member, debts []debt) (wishes []wish) {
	for _, d := range debts {
		pod, container := slim(d.object)
		stop, remove := event{kind: nri.Event_STOP_POD_SANDBOX, pod: d.id}, event{kind: nri.Event_REMOVE_POD_SANDBOX, pod: d.id}
		stop.req, remove.req = proto.Message(&nri.StopPodSandboxRequest{Pod: pod}), proto.Message(&nri.RemovePodSandboxRequest{Pod: pod})
		if container != nil {
			stop = event{kind: nri.Event_STOP_CONTAINER, pod: pod.GetId(), container: d.id, req: &nri.StopContainerRequest{Pod: pod, Container: container}}
			remove = event{kind: nri.Event_REMOVE_CONTAINER, pod: pod.GetId(), container: d.id, req: &nri.RemoveContainerRequest{Pod: pod, Container: container}}
		}
		missed := []event{stop, remove}
		if d.stopOnly {
			missed = missed[:1]
		}
		for _, e := range missed {
			w, err := h.deliver(ctx, m, e, nil)
			if err != nil && (errors.Is(err, plug.ErrLost) || ctx.Err() != nil) {
				return wishes
			}
			wishes = append(wishes, w)
		}
	}
	if len(debts) > 0 {
		h.Log.InfoContext(ctx, "plugin told of what has ended while it was away",
			slog.String("plugin", m.info.ID.String()), slog.Int("objects", len(debts)))
	}
	return wishes
}

// known are the objects that plugins know and whose end they have not been told.
func (h *Hub) knownObjects() map[string]object {
	h.mu.Lock()
	members := h.members
	h.mu.Unlock()
	ids := make(map[string]bool)
	for _, m := range members {
		for id := range m.open() {
			ids[id] = true
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	found := make(map[string]object)
	for id := range ids {
		if o, ok := h.objects[id]; ok {
			found[id] = o
		}
	}
	return found
}
