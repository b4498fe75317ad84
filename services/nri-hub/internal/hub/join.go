package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	nri "github.com/containerd/nri/pkg/api"
)

// Serve keeps a configured plugin in the hub until it is disconnected or ctx ends. It
// waits for a gateway, synchronises the plugin and delivers what has happened
// meanwhile; from then on the plugin takes part in requests. The returned error says
// why the plugin never came that far; nil means that it was active.
func (h *Hub) Serve(ctx context.Context, p Plugin) error {
	m := newMember(p)
	// The joining plugin has its own turn, so that whatever comes after the backlog
	// waits for the backlog.
	turn := m.queue.enter()
	underWay, err := h.insert(m)
	if err != nil {
		p.Close(err)
		return err
	}
	wasActive := false
	defer func() {
		if h.remove(m) && wasActive {
			h.remember()
		}
	}()

	found, updates, err := h.synchronise(ctx, m, underWay)
	if err != nil {
		turn.leave()
		p.Close(err)
		return fmt.Errorf("synchronise plugin %q: %w", m.info.ID, err)
	}
	wasActive = true
	h.takeOver(ctx, m)
	wishes := append([]wish{{updates: updates}}, h.replay(ctx, m, found)...)
	turn.leave()
	// Only now, because the gateway must not be called while a plugin's turn is held.
	uctx, cancel := whileConnected(ctx, p)
	for _, w := range wishes {
		h.carryOut(uctx, m, w)
	}
	cancel()
	select {
	case <-p.Done():
	case <-ctx.Done():
		p.Close(context.Cause(ctx))
	}
	return nil
}

// takeOver makes the plugin active. An older instance with its name is dismissed.
func (h *Hub) takeOver(ctx context.Context, m *member) {
	old := h.activate(m)
	h.Log.InfoContext(ctx, "plugin active", slog.String("plugin", m.info.ID.String()),
		slog.String("events", m.info.Events.PrettyString()))
	if old != nil {
		h.Log.WarnContext(ctx, "older instance of the plugin disconnected",
			slog.String("plugin", m.info.ID.String()), slog.Int("old_pid", int(old.info.PID)))
		h.dismiss(ctx, old, ErrReplaced)
	}
	h.remember()
}

// synchronise hands the inventory to the plugin. It starts over when the gateway goes
// away in the middle.
func (h *Hub) synchronise(ctx context.Context, m *member, underWay []*operation) (map[string]bool, []*nri.ContainerUpdate, error) {
	for {
		gw, err := h.awaitGateway(ctx, m.plugin.Done())
		if err != nil {
			return nil, nil, err
		}
		ictx, cancel := whileConnected(ctx, m.plugin)
		inv, err := gw.Inventory(ictx)
		cancel()
		if err != nil {
			if isDone(gw.Done()) && !isDone(m.plugin.Done()) && ctx.Err() == nil {
				h.detach(gw)
				continue
			}
			return nil, nil, fmt.Errorf("inventory: %w", err)
		}
		inv, found := h.content(m, inv, underWay)
		updates, err := h.Sync.Synchronize(ctx, m.plugin, inv)
		m.record(err)
		return found, updates, err
	}
}

// whileConnected returns a context that ends when the plugin is disconnected.
func whileConnected(ctx context.Context, p Plugin) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-p.Done():
			cancel(ErrLost)
		case <-stop:
		}
	})
	return ctx, func() {
		close(stop)
		wg.Wait()
		cancel(nil)
	}
}

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// content is what the plugin is synchronised with: the inventory without the containers
// that have ended, and what was being created when the plugin came and is not in the
// inventory. found has the ids of all of that.
func (h *Hub) content(m *member, inv Inventory, underWay []*operation) (_ Inventory, found map[string]bool) {
	found = make(map[string]bool)
	listed := make(map[string]bool)
	out := Inventory{Pods: inv.Pods}
	for _, p := range inv.Pods {
		listed[p.GetId()], found[p.GetId()] = true, true
	}
	for _, c := range inv.Containers {
		listed[c.GetId()] = true
		if c.GetState() == nri.ContainerState_CONTAINER_STOPPED {
			m.learn(c.GetId(), stopped)
			continue
		}
		found[c.GetId()] = true
		out.Containers = append(out.Containers, c)
	}
	for _, op := range underWay {
		if listed[op.id()] {
			continue
		}
		if !found[op.pod.GetId()] {
			found[op.pod.GetId()] = true
			out.Pods = append(out.Pods, op.pod)
		}
		if op.container != nil {
			found[op.id()] = true
			out.Containers = append(out.Containers, op.container)
		}
	}
	for id := range found {
		m.learn(id, known)
	}
	return out, found
}

// replay delivers what was kept while the plugin was joining. It returns the wishes in
// the answers, for which the requests are no way any more: they are long answered.
func (h *Hub) replay(ctx context.Context, m *member, found map[string]bool) (wishes []wish) {
	for _, e := range m.takeBacklog() {
		if !replayable(m, e, found) {
			continue
		}
		resp, err := h.call(ctx, m, e.kind, e.req)
		if err != nil {
			h.Log.WarnContext(ctx, "plugin failed an event from the time of its synchronisation",
				slog.String("plugin", m.info.ID.String()), slog.String("event", e.kind.PrettyName()), slog.Any("error", err))
			if errors.Is(err, ErrLost) || ctx.Err() != nil {
				return wishes
			}
			continue
		}
		if w, partly := lateWish(e, resp); len(w.updates)+len(w.evictions) > 0 || partly {
			if partly {
				h.Log.WarnContext(ctx, "adjustment came too late for a container that was created during the plugin's synchronisation",
					slog.String("plugin", m.info.ID.String()), slog.String("container_id", e.container))
			}
			wishes = append(wishes, w)
		}
	}
	return wishes
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
