package member

import (
	"time"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

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

// Status is what there is to tell now.
func (m *Member) Status() Status {
	queued := m.Queue.Length()
	m.mu.Lock()
	defer m.mu.Unlock()
	s := Status{
		Info:      m.Info,
		Rule:      m.Rule,
		State:     m.phase.String(),
		Active:    m.phase == Active,
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
		if st < object.Removed {
			s.Objects++
		}
	}
	return s
}
