package hub

import (
	"context"
	"errors"
	"log/slog"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// nurse brings a degraded plugin back: after a pause it delivers what was kept for it, in
// order, and makes it active again when nothing is left. The oldest kept event is the
// probe; at another timeout the pause doubles. It returns when the plugin is active or
// disconnected, or ctx has ended.
func (h *Hub) nurse(ctx context.Context, m *member) {
	for {
		m.mu.Lock()
		pause := m.pause
		m.mu.Unlock()
		if !h.rest(ctx, m, pause) || h.treat(ctx, m) {
			return
		}
		m.mu.Lock()
		m.pause = min(2*m.pause, h.cfg.MaxPause)
		m.mu.Unlock()
	}
}

// rest waits, and reports false if the plugin is disconnected or ctx has ended.
func (h *Hub) rest(ctx context.Context, m *member, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-m.plugin.Done():
		return false
	case <-ctx.Done():
		return false
	}
}

// treat delivers what is kept. It reports false if the plugin did not answer again.
func (h *Hub) treat(ctx context.Context, m *member) (done bool) {
	for {
		e, ok := m.next()
		if !ok {
			if m.recovers() {
				h.Log.InfoContext(ctx, "plugin answers again", slog.String("plugin", m.info.ID.String()))
				h.moved()
				return true
			}
			select {
			case <-m.stir:
				continue
			case <-m.plugin.Done():
				return true
			case <-ctx.Done():
				return true
			}
		}
		w, err := h.deliver(ctx, m, e, nil)
		h.carryOut(ctx, m, w)
		switch {
		case err == nil:
		case errors.Is(err, errTimeout):
			return false
		case errors.Is(err, plug.ErrLost) || ctx.Err() != nil:
			return true
		}
	}
}

// deliver tells a plugin of a kept event. The returned wish is what can still be done of
// the answer, for which the request is no way any more.
func (h *Hub) deliver(ctx context.Context, m *member, e event, found map[string]bool) (wish, error) {
	if !replayable(m, e, found) {
		return wish{}, nil
	}
	begin := time.Now()
	resp, _, err := h.call(ctx, m, e.kind, e.req, 0, nil)
	if err != nil {
		h.Log.WarnContext(ctx, "plugin failed an event that was kept for it",
			slog.String("plugin", m.info.ID.String()), slog.String("event", e.kind.PrettyName()), slog.Any("error", err))
		return wish{}, err
	}
	w, partly := lateWish(e, resp)
	if partly {
		h.Log.WarnContext(ctx, "adjustment came too late for a container that was created without the plugin",
			slog.String("plugin", m.info.ID.String()), slog.String("container_id", e.container), slog.Duration("took", time.Since(begin)))
	}
	return w, nil
}

// replayable reports whether the plugin is to be told of a kept event: it needs no
// creation of what it was synchronised with, and no end of what it never knew.
func replayable(m *member, e event, found map[string]bool) bool {
	switch e.kind {
	case nri.Event_RUN_POD_SANDBOX:
		if found[e.pod] {
			return false
		}
		m.learn(e.pod, known)
	case nri.Event_CREATE_CONTAINER:
		if found[e.container] {
			return false
		}
		m.learn(e.container, known)
	case nri.Event_STOP_POD_SANDBOX:
		return m.stageOf(e.pod) != 0 && m.claimStop(e.pod)
	case nri.Event_REMOVE_POD_SANDBOX:
		return m.stageOf(e.pod) != 0 && m.claimRemoval(e.pod)
	case nri.Event_STOP_CONTAINER:
		return m.stageOf(e.container) != 0 && m.claimStop(e.container)
	case nri.Event_REMOVE_CONTAINER:
		return m.stageOf(e.container) != 0 && m.claimRemoval(e.container)
	default:
		return m.stageOf(e.container) != 0 || m.stageOf(e.pod) != 0
	}
	return true
}

// lateWish turns an answer that came after its request into what can still be done.
// partly says that there is more in the answer than that.
func lateWish(e event, resp any) (w wish, partly bool) {
	switch r := resp.(type) {
	case *nri.CreateContainerResponse:
		w = wish{updates: r.GetUpdate(), evictions: r.GetEvict()}
		if res := r.GetAdjust().GetLinux().GetResources(); res != nil {
			w.updates = append(w.updates, &nri.ContainerUpdate{
				ContainerId: e.container,
				Linux:       &nri.LinuxContainerUpdate{Resources: res},
			})
		}
		partly = r.GetAdjust().Strip() != nil
	case *nri.UpdateContainerResponse:
		w = wish{updates: r.GetUpdate(), evictions: r.GetEvict()}
	case *nri.StopContainerResponse:
		w = wish{updates: r.GetUpdate()}
	}
	return w, partly
}
