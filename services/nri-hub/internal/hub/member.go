package hub

import (
	"sync"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// maxTombstones bounds how many removed objects a plugin is remembered to know of.
const maxTombstones = 8192

// phase is where a plugin is in its life.
type phase uint8

const (
	joining phase = iota // it is being synchronised; events are kept for it
	active               // it gets events
	gone                 // it gets nothing any more
)

// stage is how much of an object's end a plugin has been told.
type stage uint8

const (
	known stage = iota + 1
	stopped
	removed
)

// event is something that happened while a plugin was joining.
type event struct {
	kind      nri.Event
	pod       string
	container string
	req       proto.Message
}

// wish is what a plugin wants changed outside of the answer to a request.
type wish struct {
	updates   []*nri.ContainerUpdate
	evictions []*nri.ContainerEviction
}

// member is a plugin in the hub.
type member struct {
	plugin Plugin
	info   Info
	queue  queue
	joined chan struct{} // closed when the plugin is no longer joining
	// successor says that an older instance of the plugin was active when this one came.
	// It is set before the member is in the hub and then left alone.
	successor bool

	// mu guards all below.
	mu         sync.Mutex
	phase      phase
	backlog    []event
	objects    map[string]stage // pods and containers; their ids never collide
	tombstones []string         // oldest first
	calls      uint64
	failures   uint64
	lastError  string
}

func newMember(p Plugin) *member {
	return &member{
		plugin:  p,
		info:    p.Info(),
		joined:  make(chan struct{}),
		objects: make(map[string]stage),
	}
}

func (m *member) listensTo(e nri.Event) bool { return m.info.Events.IsSet(e) }

func (m *member) is(p phase) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.phase == p
}

// become moves the plugin on; it never moves back.
func (m *member) become(p phase) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase == joining && p != joining {
		close(m.joined)
	}
	m.phase = max(m.phase, p)
}

// keep puts the event aside for a plugin that is joining, and reports whether it did.
func (m *member) keep(e event) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != joining {
		return false
	}
	m.backlog = append(m.backlog, e)
	return true
}

// takeBacklog returns the kept events and forgets them.
func (m *member) takeBacklog() []event {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.backlog
	m.backlog = nil
	return b
}

// learn notes that the plugin knows of an object, at a stage of its end.
func (m *member) learn(id string, s stage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects[id] < s {
		m.objects[id] = s
	}
}

// stageOf is 0 for an object that the plugin was never told of.
func (m *member) stageOf(id string) stage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.objects[id]
}

// claimStop reports whether the plugin is still to be told of the object's stop, and
// notes that it is.
func (m *member) claimStop(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects[id] >= stopped {
		return false
	}
	m.objects[id] = stopped
	return true
}

// claimRemoval is claimStop for the removal. Removed objects are remembered for a while.
func (m *member) claimRemoval(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects[id] == removed {
		return false
	}
	m.objects[id] = removed
	m.tombstones = append(m.tombstones, id)
	if len(m.tombstones) > maxTombstones {
		delete(m.objects, m.tombstones[0])
		m.tombstones = m.tombstones[1:]
	}
	return true
}

func (m *member) record(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		m.calls++
		return
	}
	m.failures++
	m.lastError = err.Error()
}

// Status is what the hub tells of a plugin.
type Status struct {
	Info      Info
	Active    bool
	Calls     uint64 // calls that the plugin answered
	Failures  uint64 // calls that it failed or left unanswered
	LastError string
}

func (m *member) status() Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Status{
		Info:      m.info,
		Active:    m.phase == active,
		Calls:     m.calls,
		Failures:  m.failures,
		LastError: m.lastError,
	}
}
