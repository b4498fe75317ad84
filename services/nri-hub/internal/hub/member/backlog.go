package member

import (
	"slices"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// MaxBacklog bounds what is kept for a plugin that cannot take events now. A plugin that
// is further behind is disconnected: its next synchronisation is the shorter way.
const MaxBacklog = 8192

// Event is something that happened while a plugin could not be told.
type Event struct {
	Kind      nri.Event
	Pod       string
	Container string
	Req       proto.Message
}

func (e Event) id() string {
	if e.Container != "" {
		return e.Container
	}
	return e.Pod
}

// Wish is what a plugin wants changed outside of the answer to a request.
type Wish struct {
	Updates   []*nri.ContainerUpdate
	Evictions []*nri.ContainerEviction
}

// Keep puts the event aside for a plugin that cannot be told now. kept is false if the
// plugin can be told, or is gone; full says that too much is kept already.
func (m *Member) Keep(e Event) (kept, full bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch m.phase {
	case Joining:
	case Degraded:
		defer signal(m.stir)
		if m.cancelsOut(e) {
			return true, false
		}
	default:
		return false, false
	}
	if len(m.backlog) >= MaxBacklog {
		return false, true
	}
	m.backlog = append(m.backlog, e)
	return true, false
}

// cancelsOut drops all that is kept about an object that is gone again before a degraded
// plugin has heard of it. The caller holds mu.
func (m *Member) cancelsOut(e Event) bool {
	var begin nri.Event
	switch e.Kind {
	case nri.Event_REMOVE_CONTAINER:
		begin = nri.Event_CREATE_CONTAINER
	case nri.Event_REMOVE_POD_SANDBOX:
		begin = nri.Event_RUN_POD_SANDBOX
	default:
		return false
	}
	id, unheard := e.id(), false
	for _, b := range m.backlog {
		unheard = unheard || b.Kind == begin && b.id() == id
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

// Next takes the oldest kept event.
func (m *Member) Next() (Event, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.backlog) == 0 {
		return Event{}, false
	}
	e := m.backlog[0]
	m.backlog[0] = Event{}
	m.backlog = m.backlog[1:]
	return e, true
}

// PutBack keeps events that were taken and not delivered, before those kept since.
func (m *Member) PutBack(events []Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.backlog = append(slices.Clone(events), m.backlog...)
	signal(m.stir)
}
