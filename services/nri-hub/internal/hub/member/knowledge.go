package member

import (
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
)

// maxTombstones bounds how many removed objects a plugin is remembered to know of.
const maxTombstones = 8192

// Learn notes that the plugin knows of an object, at a stage of its end.
func (m *Member) Learn(id string, s object.Stage) { m.advance(id, s) }

// advance notes how much of an object the plugin has been told, also for after a restart,
// and reports whether that is more than before.
func (m *Member) advance(id string, s object.Stage) bool {
	if !m.Grasp(id, s) {
		return false
	}
	if m.Told != nil {
		m.Told(id, s)
	}
	return true
}

// Grasp is Learn without the note for after a restart, which whoever calls has to make if
// Grasp reports that the plugin knows more than before. Removed objects are remembered for a while.
func (m *Member) Grasp(id string, s object.Stage) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.objects[id] >= s {
		return false
	}
	m.objects[id] = s
	if s == object.Removed {
		m.tombstones = append(m.tombstones, id)
		if len(m.tombstones) > maxTombstones {
			delete(m.objects, m.tombstones[0])
			m.tombstones = m.tombstones[1:]
		}
	}
	return true
}

// StageOf is 0 for an object that the plugin was never told of.
func (m *Member) StageOf(id string) object.Stage {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.objects[id]
}

// Open are the objects that the plugin knows and whose removal it was not told.
func (m *Member) Open() map[string]object.Stage {
	m.mu.Lock()
	defer m.mu.Unlock()
	open := make(map[string]object.Stage)
	for id, s := range m.objects {
		if s < object.Removed {
			open[id] = s
		}
	}
	return open
}

// ClaimStop reports whether the plugin is still to be told of the object's stop, and
// notes that it is.
func (m *Member) ClaimStop(id string) bool { return m.advance(id, object.Stopped) }

// ClaimRemoval is ClaimStop for the removal.
func (m *Member) ClaimRemoval(id string) bool { return m.advance(id, object.Removed) }
