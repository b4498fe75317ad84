package object

import (
	"maps"
	"slices"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
)

// makingLimit is how long a creation can be under way; what takes longer has failed
// without the hub being told.
const makingLimit = 5 * time.Minute

// maxRemains bounds the removed objects of which is remembered what they were, for plugins
// that still have to hear of their end.
const maxRemains = 8192

// Making is a creation that plugins have been asked about and that may not be in an
// inventory yet: the gateway makes objects visible only after the plugins' answers.
type Making struct {
	Object

	since time.Time
}

// Table holds the objects. It is safe for concurrent use. Use NewTable.
type Table struct {
	ledger Ledger // nil if nothing is remembered

	// mu guards all below.
	mu      sync.Mutex
	objects map[string]Object  // by id
	remains []string           // objects that are removed, oldest first
	making  map[string]*Making // by id
}

// NewTable makes a table of what a ledger has remembered. New objects are noted in the
// ledger, which may be nil.
func NewTable(past Past, ledger Ledger) *Table {
	return &Table{ledger: ledger, objects: past.objects(), making: make(map[string]*Making)}
}

// Begin notes what a request starts or ends. The returned objects are new; Enroll is to be
// called with them. Plugins are looked up after it: one that joins is then either told of
// the request or finds the object among those that are being made.
func (t *Table) Begin(event nri.Event, pod *nri.PodSandbox, container *nri.Container) (fresh []Object) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fresh = t.note(event, pod, container)
	switch event {
	case nri.Event_RUN_POD_SANDBOX:
		t.expire()
		t.making[pod.GetId()] = &Making{Object: Object{Pod: pod}, since: time.Now()}
	case nri.Event_CREATE_CONTAINER:
		t.expire()
		delete(t.making, pod.GetId())
		t.making[container.GetId()] = &Making{Object: Object{Pod: pod, Container: container}, since: time.Now()}
	case nri.Event_STOP_POD_SANDBOX, nri.Event_REMOVE_POD_SANDBOX:
		delete(t.making, pod.GetId())
	case nri.Event_POST_CREATE_CONTAINER, nri.Event_START_CONTAINER, nri.Event_POST_START_CONTAINER,
		nri.Event_STOP_CONTAINER, nri.Event_REMOVE_CONTAINER:
		delete(t.making, container.GetId())
	default:
	}
	return fresh
}

// note learns a pod or container from a request; what is removed is remembered for a while,
// for plugins that hear of it later. The caller holds mu.
func (t *Table) note(event nri.Event, pod *nri.PodSandbox, container *nri.Container) (fresh []Object) {
	switch event {
	case nri.Event_REMOVE_POD_SANDBOX:
		t.bury(pod.GetId())
	case nri.Event_REMOVE_CONTAINER:
		t.bury(container.GetId())
	case nri.Event_STOP_POD_SANDBOX, nri.Event_STOP_CONTAINER:
	default:
		fresh = t.know(nil, Object{Pod: pod})
		if container != nil {
			fresh = t.know(fresh, Object{Pod: pod, Container: container})
		}
	}
	return fresh
}

// know notes an object, once, and adds it to the fresh ones then. The caller holds mu.
func (t *Table) know(fresh []Object, o Object) []Object {
	id := o.ID()
	if _, ok := t.objects[id]; ok {
		return fresh
	}
	o = o.Slim()
	t.objects[id] = o
	return append(fresh, o)
}

// Learn notes the objects of an inventory, also for after a restart.
func (t *Table) Learn(objects []Object) {
	var fresh []Object
	t.mu.Lock()
	for _, o := range objects {
		fresh = t.know(fresh, o)
	}
	t.mu.Unlock()
	t.Enroll(fresh)
}

// Enroll notes new objects for after a restart.
func (t *Table) Enroll(fresh []Object) {
	if t.ledger == nil {
		return
	}
	for _, o := range fresh {
		t.ledger.Object(o.Pod, o.Container)
	}
}

func (t *Table) bury(id string) {
	if _, ok := t.objects[id]; !ok {
		return
	}
	t.remains = append(t.remains, id)
	if len(t.remains) > maxRemains {
		delete(t.objects, t.remains[0])
		t.remains = t.remains[1:]
	}
}

// expire forgets creations that cannot be under way any more. The caller holds mu.
func (t *Table) expire() {
	maps.DeleteFunc(t.making, func(_ string, m *Making) bool { return time.Since(m.since) > makingLimit })
}

// UnderWay are the creations of which no end was seen.
func (t *Table) UnderWay() []*Making {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.making))
}

// IsUnderWay reports whether this very creation has not ended yet.
func (t *Table) IsUnderWay(m *Making) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.making[m.ID()] == m
}

// Get returns an object as far as it is remembered.
func (t *Table) Get(id string) (Object, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	o, ok := t.objects[id]
	return o, ok
}

// PodOf is the pod of a container, nil if it is not known.
func (t *Table) PodOf(container string) *nri.PodSandbox {
	o, _ := t.Get(container)
	return o.Pod
}
