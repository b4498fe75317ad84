// Package member is one plugin in the hub: its turn, the phase of its life, the events that
// are kept for it, and what it knows of pods and containers.
//
// It calls nobody. Those who do tell it what came of their calls, and ask it what the plugin
// is still to be told. All methods may be called concurrently.
package member

import (
	"errors"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/internal/spare"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// Phase is where a plugin is in its life.
type Phase uint8

// The phases.
const (
	Joining  Phase = iota // it is being synchronised; events are kept for it
	Active                // it gets events
	Degraded              // it has not answered; events are kept and delivered aside
	Gone                  // it gets nothing any more
)

// String is the phase in lower case.
func (p Phase) String() string {
	switch p {
	case Joining:
		return "joining"
	case Active:
		return "active"
	case Degraded:
		return "degraded"
	default:
		return "gone"
	}
}

// ErrDegraded says that a plugin is not called because it has not answered before.
var ErrDegraded = errors.New("plugin is degraded: it has not answered in time")

// Member is a plugin in the hub. Use New.
type Member struct {
	Plugin plug.Plugin
	Info   plug.Info
	Rule   rule.Plugin
	Queue  Queue
	// Told is called when the plugin is told more of an object than before; may be nil. It
	// is not changed once the member is in the hub, as Successor is not.
	Told func(id string, s object.Stage)
	// Successor says that an older instance of the plugin was active when this one came.
	Successor bool

	joined chan struct{} // closed when the plugin is no longer joining
	sick   chan struct{} // of capacity one; says that the plugin has become degraded
	stir   chan struct{} // of capacity one; something happened to a degraded plugin
	run    *spare.Pool   // of its calls

	// mu guards all below.
	mu         sync.Mutex
	phase      Phase
	failing    chan struct{} // closed when the plugin becomes degraded, then replaced
	backlog    []Event
	overdue    int           // calls whose time is up and that may still be answered
	failed     nri.Event     // what it did not answer
	proven     bool          // it has answered that since it became degraded
	needed     bool          // a request waits for the degraded plugin
	timeouts   int           // in a row
	pause      time.Duration // before a degraded plugin is tried
	objects    map[string]object.Stage
	tombstones []string // oldest first
	since      time.Time
	calls      uint64
	failures   uint64
	lastError  string
	latency    latency
}

// New makes a member of a configured plugin, which is joining.
func New(p plug.Plugin, r rule.Plugin) *Member {
	return &Member{
		Plugin:  p,
		Info:    p.Info(),
		Rule:    r,
		Queue:   Queue{width: r.Parallel},
		joined:  make(chan struct{}),
		sick:    make(chan struct{}, 1),
		stir:    make(chan struct{}, 1),
		failing: make(chan struct{}),
		objects: make(map[string]object.Stage),
		since:   time.Now(),
		run:     spare.New(p.Done()),
	}
}

// ListensTo reports whether the plugin has subscribed to the event.
func (m *Member) ListensTo(e nri.Event) bool { return m.Info.Events.IsSet(e) }

// Is reports whether the plugin is in that phase now.
func (m *Member) Is(p Phase) bool { return m.At() == p }

// Go runs f on a goroutine of the plugin's own.
func (m *Member) Go(f func()) { m.run.Go(f) }

// Joined is closed when the plugin is no longer joining.
func (m *Member) Joined() <-chan struct{} { return m.joined }

// Sick says, once for each time, that the plugin has become degraded.
func (m *Member) Sick() <-chan struct{} { return m.sick }

// Stirred says that something has happened to a degraded plugin since it was asked last.
func (m *Member) Stirred() <-chan struct{} { return m.stir }

// At is the plugin's phase.
func (m *Member) At() Phase {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.phase
}

// Serves reports whether the plugin is synchronised and there, even if it does not answer.
func (m *Member) Serves() bool {
	p := m.At()
	return p == Active || p == Degraded
}

// Fails is closed when the plugin becomes degraded.
func (m *Member) Fails() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.failing
}

// End takes the plugin out of all requests, for good.
func (m *Member) End() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase == Joining {
		close(m.joined)
	}
	m.phase = Gone
}

// Enter makes a joining plugin active and returns what was kept for it until then, all in
// one step: whatever comes later is for its queue.
func (m *Member) Enter() []Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	kept := m.backlog
	if m.phase == Joining {
		close(m.joined)
		m.phase, m.backlog = Active, nil
	}
	return kept
}

// Degrade makes an active plugin a degraded one and reports whether it did.
func (m *Member) Degrade(e nri.Event, first, most time.Duration) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != Active {
		return false
	}
	m.phase, m.failed, m.proven, m.needed = Degraded, e, false, false
	m.pause = min(max(first, 2*m.pause), most)
	close(m.failing)
	m.failing = make(chan struct{})
	signal(m.sick)
	return true
}

// Pause is how long a degraded plugin is left alone before it is tried.
func (m *Member) Pause() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pause
}

// Worsen doubles the pause, up to a limit.
func (m *Member) Worsen(most time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pause = min(2*m.pause, most)
}

// Recovers makes a degraded plugin active again, if nothing is kept for it, and if it has
// shown that it answers or somebody is ready to try it.
func (m *Member) Recovers() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != Degraded || len(m.backlog) > 0 || m.overdue > 0 && !m.proven && !m.needed {
		return false
	}
	m.phase, m.timeouts, m.needed = Active, 0, false
	return true
}

// Need says that a request waits for the plugin.
func (m *Member) Need() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.needed = true
	signal(m.stir)
}

// Late notes a call whose time is up.
func (m *Member) Late() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.overdue++
}

// Answered notes that the answer of a late call has come after all.
func (m *Member) Answered() {
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

// Record counts a call. That a degraded plugin answers other events than the one that it
// did not answer proves nothing: most plugins ignore most of them.
func (m *Member) Record(e nri.Event, err error, took time.Duration) {
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
	case m.phase != Degraded && (m.failed == nri.Event_UNKNOWN || m.failed == e):
		m.timeouts, m.pause = 0, 0
	case m.phase == Degraded && m.failed == e:
		m.proven = true
	default:
	}
}

// TimedOut counts a call that was not answered in time, and returns how many that makes
// in a row.
func (m *Member) TimedOut() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.timeouts++
	return m.timeouts
}
