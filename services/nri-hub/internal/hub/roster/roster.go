// Package roster keeps the list of plugins in the order of calls, the rules that are in
// force, and what the gateway is told of both.
//
// A list that was handed out never changes. The roster calls no plugin and knows nothing of
// requests; it remembers which plugins are active for the next start of the hub, and what
// those knew that have left. It may be used concurrently.
package roster

import (
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// maxAway bounds the plugins that are away and whose knowledge is remembered.
const maxAway = 64

// Config is what the roster begins with.
type Config struct {
	Generation    uint64        // of this start of the hub
	SettleTimeout time.Duration // how long the hub is not ready for lack of expected plugins
	Expected      []plug.ID     // plugins that were active before the hub started
	Known         map[plug.ID]map[string]object.Stage
	Policy        Policy
}

// Memory remembers the active plugins over a restart of the hub.
type Memory interface {
	Save(plugins []plug.ID) error
}

// Parts are what the roster works with.
type Parts struct {
	Log    *slog.Logger
	Memory Memory
	// Active is told the number of active plugins, and of degraded ones, when it may have
	// changed; it may be nil.
	Active func(active, degraded int)
}

// Roster is the list. Use New.
type Roster struct {
	cfg   Config
	parts Parts

	policy atomic.Pointer[Policy]

	// saving serialises what goes to the memory; it is held while a file is written.
	saving sync.Mutex

	// mu guards all below.
	mu      sync.Mutex
	members []*member.Member // in the order of calls; replaced, never changed
	// away is what plugins that have left were told, by their names; awayOrder has the
	// names, oldest first.
	away      map[plug.ID]map[string]object.Stage
	awayOrder []plug.ID
	movement  chan struct{} // closed when a plugin comes, goes or changes its phase
	state     State
	changed   chan struct{} // closed at the next change of state
	settled   bool
	policies  uint64
	settling  *time.Timer
	stopping  bool
}

// New makes a roster without plugins.
func New(cfg Config, parts Parts) *Roster {
	r := &Roster{
		cfg:      cfg,
		parts:    parts,
		away:     make(map[plug.ID]map[string]object.Stage),
		movement: make(chan struct{}),
		changed:  make(chan struct{}),
	}
	for id, known := range cfg.Known {
		r.away[id] = known
		r.awayOrder = append(r.awayOrder, id)
	}
	r.SetPolicy(cfg.Policy)
	return r
}

// Members are all plugins in the order of calls.
func (r *Roster) Members() []*member.Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.members
}

// Watch is Members, with a channel that is closed when a plugin comes, goes or changes its
// phase.
func (r *Roster) Watch() ([]*member.Member, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.members, r.movement
}

// Moved tells who waits for plugins that one of them has changed its phase.
func (r *Roster) Moved() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refresh()
}

// Stop refuses plugins from now on and returns those that are there.
func (r *Roster) Stop() []*member.Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopping = true
	if r.settling != nil {
		r.settling.Stop()
	}
	return r.members
}

// Insert adds a plugin that is joining. plug.ErrStopping if the hub ends.
func (r *Roster) Insert(m *member.Member) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		return plug.ErrStopping
	}
	m.Successor = slices.ContainsFunc(r.members, func(o *member.Member) bool {
		return o.Info.ID == m.Info.ID && o.Serves()
	})
	members := append(slices.Clone(r.members), m)
	slices.SortStableFunc(members, func(a, b *member.Member) int { return a.Info.ID.Compare(b.Info.ID) })
	r.members = members
	r.refresh()
	return nil
}

// Remove takes a plugin out. It reports false if the plugin was out already.
func (r *Roster) Remove(m *member.Member) bool {
	m.End()
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.Index(r.members, m)
	if i < 0 {
		return false
	}
	r.members = slices.Delete(slices.Clone(r.members), i, i+1)
	r.refresh()
	return true
}

// Activate ends a plugin's joining, takes an older instance of it out, and returns the
// events that were kept for it.
func (r *Roster) Activate(m *member.Member) (replaced *member.Member, backlog []member.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.IndexFunc(r.members, func(o *member.Member) bool {
		return o != m && o.Info.ID == m.Info.ID && o.Serves()
	})
	if i >= 0 {
		replaced = r.members[i]
		replaced.End()
		r.members = slices.Delete(slices.Clone(r.members), i, i+1)
	}
	r.forgetAway(m.Info.ID)
	backlog = m.Enter()
	r.refresh()
	return replaced, backlog
}

// Depart remembers what a plugin knew that has gone.
func (r *Roster) Depart(m *member.Member) {
	open := m.Open()
	r.mu.Lock()
	defer r.mu.Unlock()
	id := m.Info.ID
	if slices.ContainsFunc(r.members, func(o *member.Member) bool { return o.Info.ID == id && o.Serves() }) {
		return // a newer instance knows it all
	}
	r.forgetAway(id)
	r.away[id] = open
	r.awayOrder = append(r.awayOrder, id)
	if len(r.awayOrder) > maxAway {
		r.forgetAway(r.awayOrder[0])
	}
}

// forgetAway drops what is remembered of a plugin that is away. The caller holds mu.
func (r *Roster) forgetAway(id plug.ID) {
	delete(r.away, id)
	r.awayOrder = slices.DeleteFunc(r.awayOrder, func(o plug.ID) bool { return o == id })
}

// Away is what a plugin that is away was told of objects.
func (r *Roster) Away(id plug.ID) map[string]object.Stage {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.away[id])
}

// Remember saves which plugins are active, so that the next start can wait for them.
func (r *Roster) Remember() {
	r.saving.Lock()
	defer r.saving.Unlock()
	r.mu.Lock()
	if r.stopping {
		// Plugins that leave because the hub ends are expected back.
		r.mu.Unlock()
		return
	}
	var ids []plug.ID
	for _, m := range r.members {
		if m.Serves() {
			ids = append(ids, m.Info.ID)
		}
	}
	r.mu.Unlock()
	if err := r.parts.Memory.Save(ids); err != nil {
		r.parts.Log.Warn("active plugins not remembered", slog.Any("error", err))
	}
}
