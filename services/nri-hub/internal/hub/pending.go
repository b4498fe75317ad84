package hub

import (
	"context"
	"log/slog"
	"maps"
	"time"

	nri "github.com/containerd/nri/pkg/api"
)

// operationLimit is how long a creation can be under way; what takes longer has failed
// without the hub being told.
const operationLimit = 5 * time.Minute

// operation is a creation that plugins have been asked about and that may not be in an
// inventory yet: the gateway makes objects visible only after the plugins' answers.
type operation struct {
	pod       *nri.PodSandbox
	container *nri.Container // nil for a pod
	since     time.Time
}

func (o *operation) id() string {
	if o.container != nil {
		return o.container.GetId()
	}
	return o.pod.GetId()
}

// object is what is known of a pod or container, apart from its state.
type object struct {
	pod       *nri.PodSandbox
	container *nri.Container // nil for a pod
}

// learnObject notes a pod or container; what is removed is remembered for a while, for
// plugins that hear of it later. The returned ones are new to the ledger. The caller holds mu.
func (h *Hub) learnObject(r *request) (fresh []object) {
	switch r.event {
	case nri.Event_REMOVE_POD_SANDBOX:
		h.bury(r.pod.GetId())
	case nri.Event_REMOVE_CONTAINER:
		h.bury(r.container.GetId())
	case nri.Event_STOP_POD_SANDBOX, nri.Event_STOP_CONTAINER:
	default:
		fresh = h.know(nil, object{pod: r.pod})
		if r.container != nil {
			fresh = h.know(fresh, object{pod: r.pod, container: r.container})
		}
	}
	return fresh
}

// know notes an object, once, and adds it to the fresh ones then. The caller holds mu.
func (h *Hub) know(fresh []object, o object) []object {
	id := o.pod.GetId()
	if o.container != nil {
		id = o.container.GetId()
	}
	if _, ok := h.objects[id]; ok {
		return fresh
	}
	pod, container := slim(o)
	o = object{pod: pod, container: container}
	h.objects[id] = o
	return append(fresh, o)
}

// enroll notes new objects for after a restart.
func (h *Hub) enroll(fresh []object) {
	if h.Ledger == nil {
		return
	}
	for _, o := range fresh {
		h.Ledger.Object(o.pod, o.container)
	}
}

func (h *Hub) bury(id string) {
	if _, ok := h.objects[id]; !ok {
		return
	}
	h.remains = append(h.remains, id)
	if len(h.remains) > maxRemains {
		delete(h.objects, h.remains[0])
		h.remains = h.remains[1:]
	}
}

// begin notes what a request starts or ends and returns the plugins as they are at
// that moment. Both are one step, so a plugin that joins finds an object either among
// the pending ones or in a request that it is told of.
func (h *Hub) begin(r *request) []*member {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r.dry != nil {
		return h.members
	}
	if fresh := h.learnObject(r); len(fresh) > 0 {
		r.chores = append(r.chores, func() { h.enroll(fresh) })
	}
	switch r.event {
	case nri.Event_RUN_POD_SANDBOX:
		h.expire()
		h.pending[r.pod.GetId()] = &operation{pod: r.pod, since: time.Now()}
	case nri.Event_CREATE_CONTAINER:
		h.expire()
		delete(h.pending, r.pod.GetId())
		h.pending[r.container.GetId()] = &operation{pod: r.pod, container: r.container, since: time.Now()}
	case nri.Event_STOP_POD_SANDBOX, nri.Event_REMOVE_POD_SANDBOX:
		delete(h.pending, r.pod.GetId())
	case nri.Event_POST_CREATE_CONTAINER, nri.Event_START_CONTAINER, nri.Event_POST_START_CONTAINER,
		nri.Event_STOP_CONTAINER, nri.Event_REMOVE_CONTAINER:
		delete(h.pending, r.container.GetId())
	default:
	}
	return h.members
}

// Reconcile ends what an earlier gateway has left unfinished: plugins that were asked
// about an object which was then never made, or that know one whose removal nobody told
// them, are told that it is gone. It is to be called for each new gateway and returns when
// that is done or the gateway has gone.
func (h *Hub) Reconcile(ctx context.Context, gw Gateway) {
	known := h.knownObjects()
	h.mu.Lock()
	pending := maps.Clone(h.pending)
	h.mu.Unlock()
	if len(pending)+len(known) == 0 {
		return
	}
	// The gateway may be the same one on a new stream, in the middle of its work.
	timer := time.NewTimer(h.cfg.OrphanGrace)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-gw.Done():
		return
	case <-ctx.Done():
		return
	}
	inv, err := gw.Inventory(ctx)
	if err != nil {
		h.Log.WarnContext(ctx, "unfinished work not checked", slog.Any("error", err))
		return
	}
	for _, p := range inv.Pods {
		delete(pending, p.GetId())
		delete(known, p.GetId())
	}
	for _, c := range inv.Containers {
		delete(pending, c.GetId())
		delete(known, c.GetId())
	}
	for _, id := range inv.Ended {
		delete(pending, id)
		delete(known, id)
	}
	for id, op := range pending {
		delete(known, id)
		h.mu.Lock()
		unfinished := h.pending[id] == op
		h.mu.Unlock()
		if unfinished {
			h.end(ctx, op)
		}
	}
	h.mu.Lock()
	for id := range h.pending {
		delete(known, id) // it is being made again, or still
	}
	h.mu.Unlock()
	// Containers before their pods.
	for _, containers := range []bool{true, false} {
		for _, o := range known {
			if (o.container != nil) == containers {
				h.end(ctx, &operation{pod: o.pod, container: o.container})
			}
		}
	}
}

// end tells the plugins that an object is gone.
func (h *Hub) end(ctx context.Context, op *operation) {
	h.Log.WarnContext(ctx, "plugins are told of an end that nobody told them", slog.String("id", op.id()))
	var err error
	if op.container != nil {
		err = h.RemoveContainer(ctx, &nri.RemoveContainerRequest{Pod: op.pod, Container: op.container})
	} else {
		err = h.RemovePodSandbox(ctx, &nri.RemovePodSandboxRequest{Pod: op.pod})
	}
	if err != nil {
		h.Log.WarnContext(ctx, "plugins not told of the end", slog.String("id", op.id()), slog.Any("error", err))
	}
}

func (h *Hub) expire() {
	for id, op := range h.pending {
		if time.Since(op.since) > operationLimit {
			delete(h.pending, id)
		}
	}
}
