package hub

import (
	"slices"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/internal/spare"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// maxTombstones bounds how many removed objects a plugin is remembered to know of.
const maxTombstones = 8192

// maxBacklog bounds what is kept for a plugin that cannot take events now. A plugin that
// is further behind is disconnected: its next synchronisation is the shorter way.
const maxBacklog = 8192

// phase is where a plugin is in its life.
type phase uint8

const (
	joining  phase = iota // it is being synchronised; events are kept for it
	active                // it gets events
	degraded              // it has not answered; events are kept and delivered aside
	gone                  // it gets nothing any more
)

func (p phase) String() string {
	switch p {
	case joining:
		return "joining"
	case active:
		return "active"
	case degraded:
		return "degraded"
	default:
		return "gone"
	}
}

// stage is how much of an object's end a plugin has been told.
type stage uint8

const (
	known stage = iota + 1
	stopped
	removed
)

// event is something that happened while a plugin could not be told.
type event struct {
	kind      nri.Event
	pod       string
	container string
	req       proto.Message
}

func (e event) id() string {
	if e.container != "" {
		return e.container
	}
	return e.pod
}

// wish is what a plugin wants changed outside of the answer to a request.
type wish struct {
	updates   []*nri.ContainerUpdate
	evictions []*nri.ContainerEviction
}

// member is a plugin in the hub.
type member struct {
	plugin plug.Plugin
	info   plug.Info
	rule   rule.Plugin
	queue  queue
	joined chan struct{} // closed when the plugin is no longer joining
	sick   chan struct{} // of capacity one; says that the plugin has become degraded
	stir   chan struct{} // of capacity one; something happened to a degraded plugin
	// told is called when the plugin is told more of an object than before; may be nil.
	told func(object string, s stage)
	run  *spare.Pool // of its calls
	// successor says that an older instance of the plugin was active when this one came.
	// It is set before the member is in the hub and then left alone.
	successor bool

	// mu guards all below.
	mu         sync.Mutex
	phase      phase
	failing    chan struct{} // closed when the plugin becomes degraded, then replaced
	backlog    []event
	overdue    int           // calls whose time is up and that may still be answered
	failed     nri.Event     // what it did not answer
	proven     bool          // it has answered that since it became degraded
	needed     bool          // a request waits for the degraded plugin
	timeouts   int           // in a row
	pause      time.Duration // before a degraded plugin is tried
	objects    map[string]stage
	tombstones []string // oldest first
	since      time.Time
	calls      uint64
	failures   uint64
	lastError  string
	latency    latency
}

func newMember(p plug.Plugin, r rule.Plugin) *member {
	return &member{
		plugin:  p,
		info:    p.Info(),
		rule:    r,
		queue:   queue{width: r.Parallel},
		joined:  make(chan struct{}),
		sick:    make(chan struct{}, 1),
		stir:    make(chan struct{}, 1),
		failing: make(chan struct{}),
		objects: make(map[string]stage),
		since:   time.Now(),
		run:     spare.New(p.Done()),
	}
}

func (m *member) listensTo(e nri.Event) bool { return m.info.Events.IsSet(e) }

func (m *member) is(p phase) bool { return m.at() == p }

func (m *member) at() phase {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.phase
}

// serves reports whether the plugin is synchronised and there, even if it does not answer.
func (m *member) serves() bool {
	p := m.at()
	return p == active || p == degraded
}

// fails is closed when the plugin becomes degraded.
func (m *member) fails() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.failing
}

// end takes the plugin out of all requests, for good.
func (m *member) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase == joining {
		close(m.joined)
	}
	m.phase = gone
}

// enter makes a joining plugin active and returns what was kept for it until then, all in
// one step: whatever comes later is for its queue.
func (m *member) enter() []event {
	m.mu.Lock()
	defer m.mu.Unlock()
	kept := m.backlog
	if m.phase == joining {
		close(m.joined)
		m.phase, m.backlog = active, nil
	}
	return kept
}

// putBack keeps events that were taken and not delivered, before those kept since.
func (m *member) putBack(events []event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.backlog = append(slices.Clone(events), m.backlog...)
	signal(m.stir)
}

// degrade makes an active plugin a degraded one and reports whether it did.
func (m *member) degrade(e nri.Event, first, most time.Duration) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != active {
		return false
	}
	m.phase, m.failed, m.proven, m.needed = degraded, e, false, false
	m.pause = min(max(first, 2*m.pause), most)
	close(m.failing)
	m.failing = make(chan struct{})
	signal(m.sick)
	return true
}

// recovers makes a degraded plugin active again, if nothing is kept for it, and if it has
// shown that it answers or somebody is ready to try it.
func (m *member) recovers() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != degraded || len(m.backlog) > 0 || m.overdue > 0 && !m.proven && !m.needed {
		return false
	}
	m.phase, m.timeouts, m.needed = active, 0, false
	return true
}

// need says that a request waits for the plugin.
func (m *member) need() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.needed = true
	signal(m.stir)
}

// late notes a call whose time is up; answered notes that its answer came after all.
func (m *member) late() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.overdue++
}

func (m *member) answered() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.overdue--
	signal(m.stir)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// keep puts the event aside for a plugin that cannot be told now. kept is false if the
// plugin can be told, or is gone; full says that too much is kept already.
func (m *member) keep(e event) (kept, full bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch m.phase {
	case joining:
	case degraded:
		defer signal(m.stir)
		if m.cancelsOut(e) {
			return true, false
		}
	default:
		return false, false
	}
	if len(m.backlog) >= maxBacklog {
		return false, true
	}
	m.backlog = append(m.backlog, e)
	return true, false
}

// cancelsOut drops all that is kept about an object that is gone again before a degraded
// plugin has heard of it. The caller holds mu.
func (m *member) cancelsOut(e event) bool {
	var begin nri.Event
	switch e.kind {
	case nri.Event_REMOVE_CONTAINER:
		begin = nri.Event_CREATE_CONTAINER
	case nri.Event_REMOVE_POD_SANDBOX:
		begin = nri.Event_RUN_POD_SANDBOX
	default:
		return false
	}
	id, unheard := e.id(), false
	for _, b := range m.backlog {
		unheard = unheard || b.kind == begin && b.id() == id
	}
	if !unheard {
		return false
	}
	kept := m.backlog[:0]
	for _, b := range m.backlog {
		if b.id() != id {
			kept = append(kept, b)
		}
	}
	clear(m.backlog[len(kept):])
	m.backlog = kept
	return true
}

// next takes the oldest kept event.
func (m *member) next() (event, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.backlog) == 0 {
		return event{}, false
	}
	e := m.backlog[0]
	m.backlog[0] = event{}
	m.backlog = m.backlog[1:]
	return e, true
}

// learn notes that the plugin knows of an object, at a stage of its end.
func (m *member) learn(id string, s stage) { m.advance(id, s) }

// advance notes how much of an object the plugin has been told, also for after a restart,
// and reports whether that is more than before.
func (m *member) advance(id string, s stage) bool {
	if !m.grasp(id, s) {
		return false
	}
	if m.told != nil {
		m.told(id, s)
	}
	return true
}

// grasp is advance without the note for after a restart. Removed objects are remembered for a
// while.
func (m *member) grasp(id string, s stage) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects[id] >= s {
		return false
	}
	m.objects[id] = s
	if s == removed {
		m.tombstones = append(m.tombstones, id)
		if len(m.tombstones) > maxTombstones {
			delete(m.objects, m.tombstones[0])
			m.tombstones = m.tombstones[1:]
		}
	}
	return true
}

// stageOf is 0 for an object that the plugin was never told of.
func (m *member) stageOf(id string) stage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.objects[id]
}

// open are the objects that the plugin knows and whose removal it was not told.
func (m *member) open() map[string]stage {
	m.mu.Lock()
	defer m.mu.Unlock()
	open := make(map[string]stage)
	for id, s := range m.objects {
		if s < removed {
			open[id] = s
		}
	}
	return open
}

// claimStop reports whether the plugin is still to be told of the object's stop, and
// notes that it is.
func (m *member) claimStop(id string) bool { return m.advance(id, stopped) }

// claimRemoval is claimStop for the removal.
func (m *member) claimRemoval(id string) bool { return m.advance(id, removed) }

// record counts a call. That a degraded plugin answers other events than the one that it
// did not answer proves nothing: most plugins ignore most of them.
func (m *member) record(e nri.Event, err error, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.failures++
		m.lastError = err.Error()
		return
	}
	m.calls++
	m.latency.add(took)
	switch {
	case m.phase != degraded && (m.failed == nri.Event_UNKNOWN || m.failed == e):
		m.timeouts, m.pause = 0, 0
	case m.phase == degraded && m.failed == e:
		m.proven = true
	default:
	}
}

// timedOut counts a call that was not answered in time, and returns how many that makes
// in a row.
func (m *member) timedOut() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.timeouts++
	return m.timeouts
}

// latency sums up how long a plugin takes.
type latency struct {
	sum, most time.Duration
}

func (l *latency) add(d time.Duration) {
	l.sum += d
	l.most = max(l.most, d)
}

// Status is what the hub tells of a plugin.
type Status struct {
	Info      plug.Info
	Rule      rule.Plugin
	State     string // joining, active, degraded or gone
	Active    bool
	Since     time.Time // when it was configured
	Calls     uint64    // calls that the plugin answered
	Failures  uint64    // calls that it failed or left unanswered
	LastError string
	Mean      time.Duration // of the answered calls
	Slowest   time.Duration // of the answered calls
	Queued    int           // requests that have or wait for their turn
	Kept      int           // events that wait for the plugin
	Overdue   int           // calls without an answer although their time is up
	Objects   int           // pods and containers that it knows
}

func (m *member) status() Status {
	queued := m.queue.length()
	m.mu.Lock()
	defer m.mu.Unlock()
	s := Status{
		Info:      m.info,
		Rule:      m.rule,
		State:     m.phase.String(),
		Active:    m.phase == active,
		Since:     m.since,
		Calls:     m.calls,
		Failures:  m.failures,
		LastError: m.lastError,
		Slowest:   m.latency.most,
		Queued:    queued,
		Kept:      len(m.backlog),
		Overdue:   m.overdue,
	}
	if m.calls > 0 {
		s.Mean = m.latency.sum / time.Duration(m.calls)
	}
	for _, st := range m.objects {
		if st < removed {
			s.Objects++
		}
	}
	return s
}
