package hub

import (
	"context"
	"log/slog"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Reconcile ends what an earlier gateway has left unfinished: plugins that were asked
// about an object which was then never made, or that know one whose removal nobody told
// them, are told that it is gone. It is to be called for each new gateway and returns when
// that is done or the gateway has gone.
func (h *Hub) Reconcile(ctx context.Context, gw outward.Gateway) {
	known := h.knownObjects()
	underWay := h.objects.UnderWay()
	if len(underWay)+len(known) == 0 {
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
		h.log.WarnContext(ctx, "unfinished work not checked", slog.Any("error", err))
		return
	}
	there := idsOf(inv)
	for _, o := range underWay {
		if there[o.ID()] {
			continue
		}
		there[o.ID()] = true // as far as what is below is concerned
		if h.objects.IsUnderWay(o) {
			h.end(ctx, o.Object)
		}
	}
	for _, o := range h.objects.UnderWay() {
		there[o.ID()] = true // it is being made again, or still
	}
	// Containers before their pods.
	for _, containers := range []bool{true, false} {
		for id, o := range known {
			if !there[id] && (o.Container != nil) == containers {
				h.end(ctx, o)
			}
		}
	}
}

// idsOf are the ids of what there is, also of what has ended and is not removed.
func idsOf(inv plug.Inventory) map[string]bool {
	ids := make(map[string]bool)
	for _, p := range inv.Pods {
		ids[p.GetId()] = true
	}
	for _, c := range inv.Containers {
		ids[c.GetId()] = true
	}
	for _, id := range inv.Ended {
		ids[id] = true
	}
	return ids
}

// knownObjects are the objects that plugins know and whose end they have not been told.
func (h *Hub) knownObjects() map[string]object.Object {
	found := make(map[string]object.Object)
	for _, m := range h.roster.Members() {
		for id := range m.Open() {
			if o, ok := h.objects.Get(id); ok {
				found[id] = o
			}
		}
	}
	return found
}

// end tells the plugins that an object is gone.
func (h *Hub) end(ctx context.Context, o object.Object) {
	h.log.WarnContext(ctx, "plugins are told of an end that nobody told them", slog.String("id", o.ID()))
	var err error
	if o.Container != nil {
		err = h.RemoveContainer(ctx, &nri.RemoveContainerRequest{Pod: o.Pod, Container: o.Container})
	} else {
		err = h.RemovePodSandbox(ctx, &nri.RemovePodSandboxRequest{Pod: o.Pod})
	}
	if err != nil {
		h.log.WarnContext(ctx, "plugins not told of the end", slog.String("id", o.ID()), slog.Any("error", err))
	}
}
