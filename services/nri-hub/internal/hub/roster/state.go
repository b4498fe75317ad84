package roster

import (
	"fmt"
	"slices"
	"strings"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

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

// State returns what the gateway is to be told, and a channel that is closed when that
// changes.
func (r *Roster) State() (State, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state, r.changed
}

// refresh works the state out anew. The caller holds mu.
func (r *Roster) refresh() {
	close(r.movement)
	r.movement = make(chan struct{})
	required := r.Policy().Required
	actives := 0
	var sick, missing []string
	var serving strings.Builder
	for _, m := range r.members {
		if m.Serves() {
			fmt.Fprintf(&serving, "%s=%d,", m.Info.ID, m.Info.Events)
		}
		switch m.At() {
		case member.Active:
			actives++
		case member.Degraded:
			sick = append(sick, m.Info.ID.String())
		default:
		}
	}
	if r.parts.Active != nil {
		r.parts.Active(actives, len(sick))
	}
	if !r.settled && r.allExpected() {
		r.settled = true
	}
	for _, name := range required.Names() {
		if !slices.ContainsFunc(r.members, func(m *member.Member) bool { return m.Is(member.Active) && m.Info.ID.Matches(name) }) {
			missing = append(missing, name)
		}
	}
	next := State{
		Generation: r.cfg.Generation, Policy: r.policies, Events: r.events(), Ready: r.settled,
		Roster: serving.String(), Degraded: strings.Join(sick, ","), Missing: strings.Join(missing, ","),
	}
	if next == r.state {
		return
	}
	r.state = next
	close(r.changed)
	r.changed = make(chan struct{})
}

// events are those that the hub must hear of. The caller holds mu.
func (r *Roster) events() nri.EventMask {
	var events nri.EventMask
	for _, m := range r.members {
		events |= m.Info.Events
	}
	p := r.Policy()
	if p.Validator != nil || events.IsSet(nri.Event_VALIDATE_CONTAINER_ADJUSTMENT) {
		events.Set(nri.Event_CREATE_CONTAINER)
	}
	if p.Required.Any() {
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
	return events
}

// allExpected reports whether no plugin is missing. The caller holds mu.
func (r *Roster) allExpected() bool {
	present := func(match func(plug.ID) bool) bool {
		return slices.ContainsFunc(r.members, func(m *member.Member) bool { return m.Serves() && match(m.Info.ID) })
	}
	for _, id := range r.cfg.Expected {
		if !present(func(o plug.ID) bool { return o == id }) {
			return false
		}
	}
	for _, name := range r.Policy().Required.Names() {
		if !present(func(o plug.ID) bool { return o.Matches(name) }) {
			return false
		}
	}
	return true
}

// AwaitExpected begins the time for which expected plugins are waited for, once; the hub is
// not ready meanwhile.
func (r *Roster) AwaitExpected() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.settled && r.settling == nil && !r.stopping {
		r.settling = time.AfterFunc(r.cfg.SettleTimeout, r.settle)
	}
}

// settle gives up waiting for plugins that are missing, now and after the next start.
func (r *Roster) settle() {
	r.mu.Lock()
	r.settled = true
	r.refresh()
	r.mu.Unlock()
	r.Remember()
}
