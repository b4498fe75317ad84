package table

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/containerd/errdefs"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Table holds all objects. Its methods are safe for concurrent use.
type Table struct {
	store    *store.Store
	complete chan struct{} // closed by SetComplete

	// mu guards the indexes, not what they point at.
	mu         sync.RWMutex
	sandboxes  map[string]*Sandbox
	containers map[string]*Container
	names      map[string]string // sandbox and container keys → id
	sessions   map[string]int    // open streams by token
	releases   map[string]*recordv1.NetworkRelease
	unreadable []string // keys of records that cannot be read
}

// New returns a table without objects that is not complete.
func New(st *store.Store) *Table {
	return &Table{
		store: st, complete: make(chan struct{}),
		sandboxes: map[string]*Sandbox{}, containers: map[string]*Container{},
		names: map[string]string{}, sessions: map[string]int{}, releases: map[string]*recordv1.NetworkRelease{},
	}
}

// SetComplete says that every record is in the table and up to date. Call it once.
func (t *Table) SetComplete() { close(t.complete) }

// Complete is closed once the state is complete.
func (t *Table) Complete() <-chan struct{} { return t.complete }

// Ready fails with ErrUnavailable while the state is incomplete, so that no answer comes
// from half of it.
func (t *Table) Ready() error {
	select {
	case <-t.complete:
		return nil
	default:
		return fmt.Errorf("sandboxd is still recovering its state: %w", errdefs.ErrUnavailable)
	}
}

// Sandbox finds a sandbox by its full id. Errors: ErrNotFound.
func (t *Table) Sandbox(id string) (*Sandbox, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	s, ok := t.sandboxes[id]
	if !ok {
		return nil, fmt.Errorf("sandbox %q: %w", id, errdefs.ErrNotFound)
	}
	return s, nil
}

// Container finds a container by its full id. Errors: ErrNotFound.
func (t *Table) Container(id string) (*Container, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	c, ok := t.containers[id]
	if !ok {
		return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	}
	return c, nil
}

// Running finds a container that processes can be started in. Errors: ErrNotFound,
// ErrFailedPrecondition for one that does not run, ErrUnavailable as Ready.
func (t *Table) Running(id string) (*Container, error) {
	err := t.Ready()
	if err != nil {
		return nil, err
	}
	c, err := t.Container(id)
	if err != nil {
		return nil, err
	}
	if s := c.Record().GetState(); s != ContainerRunning {
		return nil, NotRunning(id, s)
	}
	return c, nil
}

// SandboxID completes an unambiguous prefix to a sandbox id. While the state is incomplete
// it fails with ErrUnavailable: what is not known then may exist.
func (t *Table) SandboxID(prefix string) (string, error) {
	err := t.Ready()
	if err != nil {
		return "", err
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	return completeID("sandbox", prefix, t.sandboxes)
}

// ContainerID completes an unambiguous prefix to a container id, as SandboxID does.
func (t *Table) ContainerID(prefix string) (string, error) {
	err := t.Ready()
	if err != nil {
		return "", err
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	return completeID("container", prefix, t.containers)
}

func completeID[T any](kind, prefix string, m map[string]T) (string, error) {
	if _, ok := m[prefix]; ok {
		return prefix, nil
	}
	if prefix == "" {
		return "", fmt.Errorf("%s id must not be empty: %w", kind, errdefs.ErrInvalidArgument)
	}
	found := ""
	for id := range m {
		if !strings.HasPrefix(id, prefix) {
			continue
		}
		if found != "" {
			return "", fmt.Errorf("%s id prefix %q is ambiguous: %w", kind, prefix, errdefs.ErrInvalidArgument)
		}
		found = id
	}
	if found == "" {
		return "", fmt.Errorf("%s %q: %w", kind, prefix, errdefs.ErrNotFound)
	}
	return found, nil
}

// Sandboxes returns all sandboxes, in no order.
func (t *Table) Sandboxes() []*Sandbox {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Collect(maps.Values(t.sandboxes))
}

// Networked returns the sandboxes that have a network or may have one, in no order: also
// those whose network is owed a release and those whose record cannot be read.
func (t *Table) Networked() []pod.NetworkHolder {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var out []pod.NetworkHolder
	for id, s := range t.sandboxes {
		if rec := s.Record(); rec.GetNetworkAttached() {
			out = append(out, pod.NetworkHolder{SandboxID: id, Raw: rec.GetCniResult()})
		}
	}
	for id, r := range t.releases {
		out = append(out, pod.NetworkHolder{SandboxID: id, Raw: r.GetCniResult()})
	}
	for _, id := range t.unreadable {
		out = append(out, pod.NetworkHolder{SandboxID: id})
	}
	return out
}

// Containers returns all containers, in no order.
func (t *Table) Containers() []*Container {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Collect(maps.Values(t.containers))
}

// ContainersOf returns the containers of a sandbox, by id.
func (t *Table) ContainersOf(sandboxID string) []*Container {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var out []*Container
	for _, c := range t.containers {
		if c.Sandbox.ID == sandboxID {
			out = append(out, c)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// AddSandbox enters a sandbox and reserves its name. If the name is taken it returns the
// holder's id, and the holder unless it is just being forgotten.
func (t *Table) AddSandbox(s *Sandbox) (holderID string, holder *Sandbox) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id, taken := t.names[s.key()]; taken {
		return id, t.sandboxes[id]
	}
	t.names[s.key()] = s.ID
	t.sandboxes[s.ID] = s
	return "", nil
}

// AddContainer is AddSandbox for a container.
func (t *Table) AddContainer(c *Container) (holderID string, holder *Container) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id, taken := t.names[c.key()]; taken {
		return id, t.containers[id]
	}
	t.names[c.key()] = c.ID
	t.containers[c.ID] = c
	return "", nil
}

// ForgetContainer drops a container without a record, and its name.
func (t *Table) ForgetContainer(c *Container) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.containers, c.ID)
	if t.names[c.key()] == c.ID {
		delete(t.names, c.key())
	}
}

// forgetSandbox drops a sandbox without a record, and its name. A network that is owed a
// release (nil for none) is known from then on.
func (t *Table) forgetSandbox(s *Sandbox, owed *recordv1.NetworkRelease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if owed != nil {
		t.releases[owed.GetSandboxId()] = owed
	}
	delete(t.sandboxes, s.ID)
	if t.names[s.key()] == s.ID {
		delete(t.names, s.key())
	}
}

// Fill enters the records of a snapshot. Of two objects with one name the younger keeps it;
// the other stays listed under its id. It returns the ids of the sandboxes that lost theirs.
func (t *Table) Fill(snap store.Snapshot) (nameless []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.SortFunc(snap.Sandboxes, func(a, b *recordv1.Sandbox) int {
		return a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime())
	})
	for _, r := range snap.Releases {
		t.releases[r.GetSandboxId()] = r
	}
	for _, keys := range snap.Broken {
		t.unreadable = append(t.unreadable, keys...)
	}
	for _, rec := range snap.Sandboxes {
		s := NewSandbox(rec)
		if other, taken := t.names[s.key()]; taken {
			nameless = append(nameless, other)
		}
		t.names[s.key()] = s.ID
		t.sandboxes[s.ID] = s
	}
	slices.SortFunc(snap.Containers, func(a, b *recordv1.Container) int {
		return a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime())
	})
	for _, rec := range snap.Containers {
		s := t.sandboxes[rec.GetSandboxId()]
		if s == nil {
			// Its sandbox's record is lost or broken: it stays listed until it is removed.
			s = NewSandbox(&recordv1.Sandbox{Id: rec.GetSandboxId(), State: SandboxStopped})
		}
		c := NewContainer(rec, s)
		t.names[c.key()] = c.ID
		t.containers[c.ID] = c
	}
	return nameless
}
