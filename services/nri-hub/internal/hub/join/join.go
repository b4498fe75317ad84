// Package join brings plugins into the hub and keeps them there until they are disconnected:
// it synchronises them, lets them take over from an older instance, and tells them what they
// have missed.
//
// Nobody waits for that but requests that the joining plugin could change or refuse, and those
// not longer than for a plugin that answers slowly. What happens meanwhile is kept for the
// plugin and delivered right after, in order, so that it learns of every pod and container
// either from its synchronisation or by an event.
package join

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/call"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
)

// Synchronizer hands an inventory to a plugin and returns the updates that the plugin
// answers with.
type Synchronizer interface {
	// limit is for one part of the synchronisation; zero means the synchronizer's own.
	Synchronize(ctx context.Context, p plug.Plugin, inv plug.Inventory, limit time.Duration) ([]*nri.ContainerUpdate, error)
}

// Parts are what plugins are brought in with.
type Parts struct {
	Log     *slog.Logger
	Roster  *roster.Roster
	Objects *object.Table
	Outward *outward.Link
	Caller  *call.Caller
	Sync    Synchronizer
	Ledger  object.Ledger // of what plugins are told; nil if nothing remembers it
}

// Joiner brings plugins in. Use New.
type Joiner struct{ parts Parts }

// New makes a Joiner.
func New(parts Parts) *Joiner { return &Joiner{parts: parts} }

// Serve keeps a configured plugin in the hub until it is disconnected or ctx ends. It
// waits for a gateway, synchronises the plugin and delivers what has happened
// meanwhile; from then on the plugin takes part in requests. The returned error says
// why the plugin never came that far; nil means that it was active.
func (j *Joiner) Serve(ctx context.Context, p plug.Plugin) error {
	m := member.New(p, j.parts.Roster.Rule(p.Info().ID))
	if j.parts.Ledger != nil {
		m.Told = func(id string, s object.Stage) { j.parts.Ledger.Told(m.Info.ID, id, s) }
	}
	// The joining plugin has its own turn, so that whatever comes after the backlog
	// waits for the backlog.
	turn := m.Queue.Enter()
	if err := j.parts.Roster.Insert(m); err != nil {
		p.Close(err)
		return err
	}
	// What is under way at this moment is in neither the events to come nor, perhaps, the
	// inventory. It is looked up after the insertion: see object.Table.Begin.
	underWay := j.parts.Objects.UnderWay()
	wasActive := false
	defer func() {
		out := j.parts.Roster.Remove(m)
		if wasActive {
			j.parts.Roster.Depart(m)
		}
		if out && wasActive {
			j.parts.Roster.Remember()
		}
	}()

	found, debts, updates, err := j.synchronise(ctx, m, underWay)
	if err != nil {
		turn.Leave()
		p.Close(err)
		return fmt.Errorf("synchronise plugin %q: %w", m.Info.ID, err)
	}
	wasActive = true
	backlog := j.takeOver(ctx, m)
	wishes := append([]member.Wish{{Updates: updates}}, j.settleDebts(ctx, m, debts)...)
	wishes = append(wishes, j.replay(ctx, m, backlog, found)...)
	turn.Leave()
	// Only now, because the gateway must not be called while a plugin's turn is held.
	uctx, cancel := whileConnected(ctx, p)
	for _, w := range wishes {
		j.parts.Outward.CarryOut(uctx, m, w)
	}
	cancel()
	for {
		select {
		case <-m.Sick():
			j.parts.Caller.Nurse(ctx, m)
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
func (j *Joiner) takeOver(ctx context.Context, m *member.Member) []member.Event {
	old, backlog := j.parts.Roster.Activate(m)
	j.parts.Log.InfoContext(ctx, "plugin active", slog.String("plugin", m.Info.ID.String()),
		slog.String("events", m.Info.Events.PrettyString()))
	if old != nil {
		j.parts.Log.WarnContext(ctx, "older instance of the plugin disconnected",
			slog.String("plugin", m.Info.ID.String()), slog.Int("old_pid", int(old.Info.PID)))
		j.parts.Caller.Dismiss(ctx, old, plug.ErrReplaced)
	}
	j.parts.Roster.Remember()
	return backlog
}

// synchronise hands the inventory to the plugin. It starts over when the gateway goes
// away in the middle.
func (j *Joiner) synchronise(ctx context.Context, m *member.Member, underWay []*object.Making) (map[string]bool, []debt, []*nri.ContainerUpdate, error) {
	for {
		gw, err := j.parts.Outward.Await(ctx, m.Plugin.Done())
		if err != nil {
			return nil, nil, nil, err
		}
		ictx, cancel := whileConnected(ctx, m.Plugin)
		inv, err := gw.Inventory(ictx)
		cancel()
		if err != nil {
			if isDone(gw.Done()) && !isDone(m.Plugin.Done()) && ctx.Err() == nil {
				j.parts.Outward.Detach(gw)
				continue
			}
			return nil, nil, nil, fmt.Errorf("inventory: %w", err)
		}
		inv, found, debts := j.content(m, inv, underWay)
		begin := time.Now()
		updates, err := j.parts.Sync.Synchronize(ctx, m.Plugin, inv, m.Rule.Synchronize)
		m.Record(nri.Event_UNKNOWN, err, time.Since(begin))
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

// content is what the plugin is synchronised with: the inventory without the containers
// that have ended, and what was being created when the plugin came and is not in the
// inventory. found has the ids of all of that. The debts are the ends that the plugin has
// missed while it was away.
func (j *Joiner) content(m *member.Member, inv plug.Inventory, underWay []*object.Making) (_ plug.Inventory, found map[string]bool, _ []debt) {
	found = make(map[string]bool)
	listed := make(map[string]bool)
	pods := make(map[string]*nri.PodSandbox, len(inv.Pods))
	var out plug.Inventory
	var ended []string
	for _, p := range inv.Pods {
		pods[p.GetId()] = p
		listed[p.GetId()] = true
		if m.Rule.Pods.Match(p) {
			found[p.GetId()] = true
			out.Pods = append(out.Pods, p)
		}
	}
	for _, id := range inv.Ended {
		listed[id] = true
	}
	j.parts.Objects.Learn(objectsOf(inv, pods))
	for _, c := range inv.Containers {
		listed[c.GetId()] = true
		if !m.Rule.Pods.Match(pods[c.GetPodSandboxId()]) {
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
		if listed[op.ID()] || !m.Rule.Pods.Match(op.Pod) {
			continue
		}
		if !found[op.Pod.GetId()] {
			found[op.Pod.GetId()] = true
			out.Pods = append(out.Pods, op.Pod)
		}
		if op.Container != nil {
			found[op.ID()] = true
			out.Containers = append(out.Containers, op.Container)
		}
	}
	for id := range found {
		m.Learn(id, object.Known)
		listed[id] = true
	}
	return out, found, append(j.owedStops(m, append(ended, inv.Ended...)), j.owed(m, listed)...)
}

// objectsOf are the pods and containers of an inventory.
func objectsOf(inv plug.Inventory, pods map[string]*nri.PodSandbox) []object.Object {
	objects := make([]object.Object, 0, len(inv.Pods)+len(inv.Containers))
	for _, p := range inv.Pods {
		objects = append(objects, object.Object{Pod: p})
	}
	for _, c := range inv.Containers {
		objects = append(objects, object.Object{Pod: pods[c.GetPodSandboxId()], Container: c})
	}
	return objects
}

// replay delivers what was kept while the plugin was joining. It returns the wishes in
// the answers, for which the requests are no way any more: they are long answered. What a
// plugin that stops answering has not got is kept for it.
func (j *Joiner) replay(ctx context.Context, m *member.Member, backlog []member.Event, found map[string]bool) (wishes []member.Wish) {
	for i, e := range backlog {
		if m.Is(member.Degraded) {
			m.PutBack(backlog[i:])
			return wishes
		}
		w, err := j.parts.Caller.Deliver(ctx, m, e, found)
		if err != nil && (errors.Is(err, plug.ErrLost) || ctx.Err() != nil) {
			return wishes
		}
		wishes = append(wishes, w)
	}
	return wishes
}
