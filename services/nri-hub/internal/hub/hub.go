package hub

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// Config are the hub's rules.
type Config struct {
	Generation     uint64        // of this start of the hub
	RequestTimeout time.Duration // for one call of one plugin
	JoinWait       time.Duration // how long a request waits for a plugin that is joining
	RequiredWait   time.Duration // how long a request waits for a plugin that it needs
	DegradeAfter   int           // timeouts in a row that make a plugin degraded; less than one means one
	MinPause       time.Duration // before a degraded plugin is tried first
	MaxPause       time.Duration // the longest time before a degraded plugin is tried again
	SettleTimeout  time.Duration // how long the hub is not ready for lack of expected plugins
	OrphanGrace    time.Duration // after which what a lost gateway has left unfinished is ended
	UpdateTimeout  time.Duration // for an update that a plugin asks the gateway for
	Plugins        rule.Plugins  // how single plugins are treated
	ListedOnly     bool          // refuse plugins for which there is no rule
	Required       rule.Required // plugins without which pods and containers are not created
	Runtime        Runtime       // as plugins are told before a gateway has come
	Expected       []plug.ID     // plugins that were active before the hub started
	Past           Past          // what plugins had been told before the hub started
}

// Parts are what the hub works with.
type Parts struct {
	Log    *slog.Logger
	Sync   plug.Synchronizer
	Memory Memory
	// Ledger remembers what plugins were told; nil if nothing does.
	Ledger Ledger
	// Validator checks each merged adjustment; nil if there is none.
	Validator Validator
	// Active is told the number of active plugins, and of degraded ones, when it may have
	// changed.
	Active func(active, degraded int)
	// Audit takes the records of what plugins change; it must not block. Nil drops them.
	Audit func(ctx context.Context, r Record)
	// TimedOut is told of a call that was not answered in time; it may be nil.
	TimedOut func(plugin plug.ID, e nri.Event)
}

// Memory remembers the active plugins over a restart of the hub.
type Memory interface {
	Save(plugins []plug.ID) error
}

// Validator accepts or refuses a merged adjustment.
type Validator interface {
	ValidateContainerAdjustment(ctx context.Context, req *nri.ValidateContainerAdjustmentRequest) error
}

// State is what the gateway is told.
type State struct {
	Generation uint64
	Events     nri.EventMask
	Ready      bool
	Degraded   string // names of degraded plugins, with commas
	Roster     string // plugins that get events, and which; changes when one comes or goes
	Policy     uint64 // counts the changes of the rules
	Missing    string // names of required plugins that cannot be called now, with commas
}

// Hub is the registry of plugins and the way to them. Use New.
type Hub struct {
	cfg Config
	Parts

	policy atomic.Pointer[policy]

	// calls are the calls of plugins, and what waits for their late answers.
	calls sync.WaitGroup

	// saving serialises what goes to the memory; it is held while a file is written.
	saving sync.Mutex

	// mu guards all below.
	mu      sync.Mutex
	members []*member // in the order of calls; replaced, never changed
	pending map[string]*operation
	objects map[string]object // pods and containers by id
	remains []string          // objects that are removed, oldest first
	// away is what plugins that have left were told, by their names; awayOrder has the
	// names, oldest first.
	away      map[plug.ID]map[string]stage
	awayOrder []plug.ID
	movement  chan struct{} // closed when a plugin comes, goes or changes its phase
	gateway   Gateway
	runtime   Runtime
	arrived   chan struct{} // closed when there is a gateway
	state     State
	changed   chan struct{} // closed at the next change of state
	settled   bool
	policies  uint64
	settling  *time.Timer
	stopping  bool
}

// New makes a hub without plugins and without gateway.
func New(cfg Config, parts Parts) *Hub {
	h := &Hub{
		cfg:      cfg,
		runtime:  cfg.Runtime,
		Parts:    parts,
		pending:  make(map[string]*operation),
		objects:  make(map[string]object),
		away:     make(map[plug.ID]map[string]stage),
		movement: make(chan struct{}),
		arrived:  make(chan struct{}),
		changed:  make(chan struct{}),
	}
	h.recall(cfg.Past)
	h.SetPolicy(cfg.Required, cfg.Plugins, cfg.ListedOnly, parts.Validator)
	return h
}

// Generation is the number of this start of the hub.
func (h *Hub) Generation() uint64 { return h.cfg.Generation }

// policy is what may change while the hub runs. Its fields are those of Config and Parts.
type policy struct {
	plugins    rule.Plugins
	listedOnly bool
	required   rule.Required
	validator  Validator
}

// SetPolicy changes the required plugins, the rules for plugins that connect from now on, and
// the validator. A plugin that is connected keeps the rule that it was met with.
func (h *Hub) SetPolicy(required rule.Required, plugins rule.Plugins, listedOnly bool, validator Validator) {
	h.policy.Store(&policy{plugins: plugins, listedOnly: listedOnly, required: required, validator: validator})
	h.mu.Lock()
	defer h.mu.Unlock()
	h.policies++
	h.refresh()
}

// Required says which pods require plugins.
func (h *Hub) Required() rule.Required { return h.policy.Load().required }

func (h *Hub) validator() Validator { return h.policy.Load().validator }

// State returns what the gateway is to be told, and a channel that is closed when that
// changes.
func (h *Hub) State() (State, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state, h.changed
}

// Plugins lists all plugins in the order of calls.
func (h *Hub) Plugins() []Status {
	h.mu.Lock()
	members := h.members
	h.mu.Unlock()
	list := make([]Status, 0, len(members))
	for _, m := range members {
		list = append(list, m.status())
	}
	return list
}

// Shutdown tells all plugins that the hub ends and disconnects them. It returns when
// all have been told or the context has ended. Plugins that come later are refused.
func (h *Hub) Shutdown(ctx context.Context) {
	h.mu.Lock()
	h.stopping = true
	members := h.members
	if h.settling != nil {
		h.settling.Stop()
	}
	h.mu.Unlock()
	var wg sync.WaitGroup
	for _, m := range members {
		wg.Go(func() { h.dismiss(ctx, m, plug.ErrStopping) })
	}
	wg.Wait()
	h.calls.Wait()
}

// moved tells who waits for plugins that one of them has changed its phase.
func (h *Hub) moved() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refresh()
}

// dismiss says goodbye to a plugin before its connection is closed.
func (h *Hub) dismiss(ctx context.Context, m *member, cause error) {
	ctx, cancel := context.WithTimeout(ctx, h.cfg.RequestTimeout)
	defer cancel()
	if err := m.plugin.Shutdown(ctx); err != nil {
		h.Log.DebugContext(ctx, "plugin did not answer its shutdown",
			slog.String("plugin", m.info.ID.String()), slog.Any("error", err))
	}
	m.plugin.Close(cause)
}

// insert adds a member; what was under way at that moment is returned, because it is
// in neither the events to come nor, perhaps, the inventory.
func (h *Hub) insert(m *member) ([]*operation, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopping {
		return nil, plug.ErrStopping
	}
	m.successor = slices.ContainsFunc(h.members, func(o *member) bool {
		return o.info.ID == m.info.ID && o.serves()
	})
	members := append(slices.Clone(h.members), m)
	slices.SortStableFunc(members, func(a, b *member) int { return a.info.ID.Compare(b.info.ID) })
	h.members = members
	underWay := make([]*operation, 0, len(h.pending))
	for _, op := range h.pending {
		underWay = append(underWay, op)
	}
	h.refresh()
	return underWay, nil
}

// remove takes a member out. It reports false if the member was out already.
func (h *Hub) remove(m *member) bool {
	m.end()
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.Index(h.members, m)
	if i < 0 {
		return false
	}
	h.members = slices.Delete(slices.Clone(h.members), i, i+1)
	h.refresh()
	return true
}

// activate ends a member's joining, takes an older instance of the same plugin out, and
// returns the events that were kept for the member.
func (h *Hub) activate(m *member) (replaced *member, backlog []event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.members, func(o *member) bool {
		return o != m && o.info.ID == m.info.ID && o.serves()
	})
	if i >= 0 {
		replaced = h.members[i]
		replaced.end()
		h.members = slices.Delete(slices.Clone(h.members), i, i+1)
	}
	h.forgetAway(m.info.ID)
	backlog = m.enter()
	h.refresh()
	return replaced, backlog
}

// refresh works the state out anew. The caller holds mu.
func (h *Hub) refresh() {
	var events nri.EventMask
	close(h.movement)
	h.movement = make(chan struct{})
	actives := 0
	var sick, missing []string
	var roster strings.Builder
	for _, m := range h.members {
		events |= m.info.Events
		if m.serves() {
			fmt.Fprintf(&roster, "%s=%d,", m.info.ID, m.info.Events)
		}
		switch m.at() {
		case active:
			actives++
		case degraded:
			sick = append(sick, m.info.ID.String())
		default:
		}
	}
	if h.Active != nil {
		h.Active(actives, len(sick))
	}
	if h.validator() != nil || events.IsSet(nri.Event_VALIDATE_CONTAINER_ADJUSTMENT) {
		events.Set(nri.Event_CREATE_CONTAINER)
	}
	if h.Required().Any() {
		events.Set(nri.Event_RUN_POD_SANDBOX, nri.Event_CREATE_CONTAINER)
	}
	// The end of what has begun must be seen, or a plugin that joins later would be
	// told of an object that is long gone.
	if events.IsSet(nri.Event_CREATE_CONTAINER) {
		events.Set(nri.Event_POST_CREATE_CONTAINER, nri.Event_STOP_CONTAINER, nri.Event_REMOVE_CONTAINER)
	}
	if events.IsSet(nri.Event_RUN_POD_SANDBOX) {
		events.Set(nri.Event_STOP_POD_SANDBOX, nri.Event_REMOVE_POD_SANDBOX)
	}
	if !h.settled && h.allExpected() {
		h.settled = true
	}
	for _, name := range h.Required().Names() {
		if !slices.ContainsFunc(h.members, func(m *member) bool { return m.is(active) && m.info.ID.Matches(name) }) {
			missing = append(missing, name)
		}
	}
	next := State{
		Generation: h.cfg.Generation, Policy: h.policies, Events: events, Ready: h.settled,
		Roster: roster.String(), Degraded: strings.Join(sick, ","), Missing: strings.Join(missing, ","),
	}
	if next == h.state {
		return
	}
	h.state = next
	close(h.changed)
	h.changed = make(chan struct{})
}

// allExpected reports whether no plugin is missing. The caller holds mu.
func (h *Hub) allExpected() bool {
	present := func(match func(plug.ID) bool) bool {
		return slices.ContainsFunc(h.members, func(m *member) bool { return m.serves() && match(m.info.ID) })
	}
	for _, id := range h.cfg.Expected {
		if !present(func(o plug.ID) bool { return o == id }) {
			return false
		}
	}
	for _, name := range h.Required().Names() {
		if !present(func(o plug.ID) bool { return o.Matches(name) }) {
			return false
		}
	}
	return true
}

// settle gives up waiting for plugins that are missing, now and after the next start.
func (h *Hub) settle() {
	h.mu.Lock()
	h.settled = true
	h.refresh()
	h.mu.Unlock()
	h.remember()
}

// remember saves which plugins are active, so that the next start can wait for them.
func (h *Hub) remember() {
	h.saving.Lock()
	defer h.saving.Unlock()
	h.mu.Lock()
	if h.stopping {
		// Plugins that leave because the hub ends are expected back.
		h.mu.Unlock()
		return
	}
	var ids []plug.ID
	for _, m := range h.members {
		if m.serves() {
			ids = append(ids, m.info.ID)
		}
	}
	h.mu.Unlock()
	if err := h.Memory.Save(ids); err != nil {
		h.Log.Warn("active plugins not remembered", slog.Any("error", err))
	}
}
