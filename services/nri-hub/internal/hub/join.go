package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Serve keeps a configured plugin in the hub until it is disconnected or ctx ends. It
// waits for a gateway, synchronises the plugin and delivers what has happened
// meanwhile; from then on the plugin takes part in requests. The returned error says
// why the plugin never came that far; nil means that it was active.
func (h *Hub) Serve(ctx context.Context, p plug.Plugin) error {
	m := newMember(p, h.policy.Load().plugins.For(p.Info().ID.Index, p.Info().ID.Name))
	if h.Ledger != nil {
		m.told = func(object string, s stage) { h.Ledger.Told(m.info.ID, object, s) }
	}
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
		out := h.remove(m)
		if wasActive {
			h.depart(m)
		}
		if out && wasActive {
			h.remember()
		}
	}()

	found, debts, updates, err := h.synchronise(ctx, m, underWay)
	if err != nil {
		turn.leave()
		p.Close(err)
		return fmt.Errorf("synchronise plugin %q: %w", m.info.ID, err)
	}
	wasActive = true
	backlog := h.takeOver(ctx, m)
	wishes := append([]wish{{updates: updates}}, h.settleDebts(ctx, m, debts)...)
	wishes = append(wishes, h.replay(ctx, m, backlog, found)...)
	turn.leave()
	// Only now, because the gateway must not be called while a plugin's turn is held.
	uctx, cancel := whileConnected(ctx, p)
	for _, w := range wishes {
		h.carryOut(uctx, m, w)
	}
	cancel()
	for {
		select {
		case <-m.sick:
			h.nurse(ctx, m)
		case <-p.Done():
			return nil
		case <-ctx.Done():
			p.Close(context.Cause(ctx))
			return nil
		}
	}
}

// takeOver makes the plugin active and returns what was kept for it. An older instance
// with its name is dismissed.
func (h *Hub) takeOver(ctx context.Context, m *member) []event {
	old, backlog := h.activate(m)
	h.Log.InfoContext(ctx, "plugin active", slog.String("plugin", m.info.ID.String()),
		slog.String("events", m.info.Events.PrettyString()))
	if old != nil {
		h.Log.WarnContext(ctx, "older instance of the plugin disconnected",
			slog.String("plugin", m.info.ID.String()), slog.Int("old_pid", int(old.info.PID)))
		h.dismiss(ctx, old, plug.ErrReplaced)
	}
	h.remember()
	return backlog
}

// synchronise hands the inventory to the plugin. It starts over when the gateway goes
// away in the middle.
func (h *Hub) synchronise(ctx context.Context, m *member, underWay []*operation) (map[string]bool, []debt, []*nri.ContainerUpdate, error) {
	for {
		gw, err := h.awaitGateway(ctx, m.plugin.Done())
		if err != nil {
			return nil, nil, nil, err
		}
		ictx, cancel := whileConnected(ctx, m.plugin)
		inv, err := gw.Inventory(ictx)
		cancel()
		if err != nil {
			if isDone(gw.Done()) && !isDone(m.plugin.Done()) && ctx.Err() == nil {
				h.detach(gw)
				continue
			}
			return nil, nil, nil, fmt.Errorf("inventory: %w", err)
		}
		inv, found, debts := h.content(m, inv, underWay)
		begin := time.Now()
		updates, err := h.Sync.Synchronize(ctx, m.plugin, inv, m.rule.Synchronize)
		m.record(nri.Event_UNKNOWN, err, time.Since(begin))
		return found, debts, updates, err
	}
}

// whileConnected returns a context that ends when the plugin is disconnected.
func whileConnected(ctx context.Context, p plug.Plugin) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-p.Done():
			cancel(plug.ErrLost)
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

// learnInventory notes the pods and containers of an inventory.
func (h *Hub) learnInventory(inv plug.Inventory, pods map[string]*nri.PodSandbox) {
	var fresh []object
	h.mu.Lock()
	for _, p := range pods {
		fresh = h.know(fresh, object{pod: p})
	}
	for _, c := range inv.Containers {
		fresh = h.know(fresh, object{pod: pods[c.GetPodSandboxId()], container: c})
	}
	h.mu.Unlock()
	h.enroll(fresh)
}

// content is what the plugin is synchronised with: the inventory without the containers
// that have ended, and what was being created when the plugin came and is not in the
// inventory. found has the ids of all of that. The debts are the ends that the plugin has
// missed while it was away.
func (h *Hub) content(m *member, inv plug.Inventory, underWay []*operation) (_ plug.Inventory, found map[string]bool, _ []debt) {
	found = make(map[string]bool)
	listed := make(map[string]bool)
	pods := make(map[string]*nri.PodSandbox, len(inv.Pods))
	var out plug.Inventory
	var ended []string
	for _, p := range inv.Pods {
		pods[p.GetId()] = p
		listed[p.GetId()] = true
		if m.rule.Pods.Match(p) {
			found[p.GetId()] = true
			out.Pods = append(out.Pods, p)
		}
	}
	for _, id := range inv.Ended {
		listed[id] = true
	}
	h.learnInventory(inv, pods)
	for _, c := range inv.Containers {
		listed[c.GetId()] = true
		if !m.rule.Pods.Match(pods[c.GetPodSandboxId()]) {
			continue
		}
		if c.GetState() == nri.ContainerState_CONTAINER_STOPPED {
			ended = append(ended, c.GetId())
			continue
		}
		found[c.GetId()] = true
		out.Containers = append(out.Containers, c)
	}
	for _, op := range underWay {
		if listed[op.id()] || !m.rule.Pods.Match(op.pod) {
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
		listed[id] = true
	}
	return out, found, append(h.owedStops(m, append(ended, inv.Ended...)), h.owed(m, listed)...)
}

// replay delivers what was kept while the plugin was joining. It returns the wishes in
// the answers, for which the requests are no way any more: they are long answered. What a
// plugin that stops answering has not got is kept for it.
func (h *Hub) replay(ctx context.Context, m *member, backlog []event, found map[string]bool) (wishes []wish) {
	for i, e := range backlog {
		if m.is(degraded) {
			m.putBack(backlog[i:])
			return wishes
		}
		w, err := h.deliver(ctx, m, e, found)
		if err != nil && (errors.Is(err, plug.ErrLost) || ctx.Err() != nil) {
			return wishes
		}
		wishes = append(wishes, w)
	}
	return wishes
}
