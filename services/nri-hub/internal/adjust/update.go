package adjust

import (
	"fmt"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// Others merges what plugins want of containers other than the one that a request is
// about: updates of resources and evictions. Alone it serves the requests that are
// about no container's resources, such as StopContainer.
type Others struct {
	owners    *nri.OwningPlugins
	updates   []*nri.ContainerUpdate
	byID      map[string]*nri.ContainerUpdate
	evictions []*nri.ContainerEviction
	evicted   map[string]bool
	creating  string // the container that is being created; it cannot be updated
	requested *Update
}

// NewOthers starts a merge.
func NewOthers() *Others { return newOthers(nri.NewOwningPlugins()) }

func newOthers(owners *nri.OwningPlugins) *Others {
	return &Others{
		owners:  owners,
		byID:    make(map[string]*nri.ContainerUpdate),
		evicted: make(map[string]bool),
	}
}

// Apply adds a plugin's updates and evictions. An update that conflicts with another
// plugin's is an error (errdefs.ErrConflict), or left out as a whole if it may fail.
func (o *Others) Apply(plugin string, updates []*nri.ContainerUpdate, evict []*nri.ContainerEviction) error {
	for _, u := range updates {
		if err := o.update(plugin, u); err != nil {
			return err
		}
	}
	for _, e := range evict {
		id := e.GetContainerId()
		if id == o.creating && id != "" {
			return fmt.Errorf("plugin %q asked for the eviction of container %q during its creation: %w",
				plugin, id, errdefs.ErrFailedPrecondition)
		}
		if !o.evicted[id] {
			o.evicted[id] = true
			o.evictions = append(o.evictions, e)
		}
	}
	return nil
}

// Updates are the merged updates in the order in which containers were first named.
func (o *Others) Updates() []*nri.ContainerUpdate { return o.updates }

// Evictions are the containers to stop, each one once, with the first reason given.
func (o *Others) Evictions() []*nri.ContainerEviction { return o.evictions }

func (o *Others) update(plugin string, u *nri.ContainerUpdate) error {
	id := u.GetContainerId()
	if id == o.creating && id != "" {
		return fmt.Errorf("plugin %q asked for an update of container %q during its creation: %w",
			plugin, id, errdefs.ErrFailedPrecondition)
	}
	// Work on copies: an update that is refused leaves nothing behind.
	owners := proto.CloneOf(fieldOwners(o.owners, id))
	normalise(owners)
	m := &merge{plugin: plugin, owners: owners}
	var err error
	if o.requested != nil && o.requested.id() == id {
		err = o.requested.apply(m, u)
	} else {
		err = o.merge(m, u)
	}
	if err != nil {
		if u.GetIgnoreFailure() {
			return nil
		}
		return fmt.Errorf("update container %q: %w", id, err)
	}
	o.owners.Owners[id] = owners
	return nil
}

func (o *Others) merge(m *merge, u *nri.ContainerUpdate) error {
	known := o.byID[u.GetContainerId()]
	next := proto.CloneOf(known)
	if known == nil {
		next = &nri.ContainerUpdate{ContainerId: u.GetContainerId(), IgnoreFailure: true}
	}
	if err := mergeUpdate(m, u, next); err != nil {
		return err
	}
	if known == nil {
		o.byID[u.GetContainerId()] = next
		o.updates = append(o.updates, next)
		return nil
	}
	known.IgnoreFailure, known.Linux = next.IgnoreFailure, next.Linux
	return nil
}

func mergeUpdate(m *merge, u, to *nri.ContainerUpdate) error {
	to.IgnoreFailure = to.IgnoreFailure && u.GetIgnoreFailure()
	if to.Linux == nil {
		to.Linux = &nri.LinuxContainerUpdate{}
	}
	if to.Linux.Resources == nil {
		to.Linux.Resources = &nri.LinuxResources{}
	}
	if err := m.resources(u.GetLinux().GetResources(), to.Linux.Resources); err != nil {
		return err
	}
	prune(to.Linux.Resources)
	return nil
}

// normalise gives a copy of owners the empty maps that copying has dropped.
func normalise(f *nri.FieldOwners) {
	ensure(&f.Simple)
	ensure(&f.Compound)
	for _, c := range f.Compound {
		ensure(&c.Owners)
	}
}

// Update merges the answers to one UpdateContainer request.
type Update struct {
	view   *nri.UpdateContainerRequest
	others *Others
	merged *nri.ContainerUpdate // nil until a plugin touches the container
}

// NewUpdate starts a merge. The request is copied and never changed.
func NewUpdate(req *nri.UpdateContainerRequest) *Update {
	u := &Update{view: proto.CloneOf(req), others: NewOthers()}
	u.others.requested = u
	return u
}

// Request is what the next plugin is to see: the wanted resources with all changes so
// far. It is valid until the next Apply and must not be changed.
func (u *Update) Request() *nri.UpdateContainerRequest { return u.view }

// Apply adds the answer of a plugin, like Create.Apply.
func (u *Update) Apply(plugin string, resp *nri.UpdateContainerResponse) error {
	return u.others.Apply(plugin, resp.GetUpdate(), resp.GetEvict())
}

// Response is the merged answer. The container of the request comes last, with all its
// wanted resources, and only if a plugin has touched it.
func (u *Update) Response() *nri.UpdateContainerResponse {
	resp := &nri.UpdateContainerResponse{
		Update: append([]*nri.ContainerUpdate(nil), u.others.Updates()...),
		Evict:  u.others.Evictions(),
	}
	if u.merged != nil {
		resp.Update = append(resp.Update, u.merged)
	}
	return resp
}

func (u *Update) id() string { return u.view.GetContainer().GetId() }

func (u *Update) apply(m *merge, up *nri.ContainerUpdate) error {
	next := proto.CloneOf(u.merged)
	if next == nil {
		next = &nri.ContainerUpdate{
			ContainerId:   u.id(),
			IgnoreFailure: true,
			Linux:         &nri.LinuxContainerUpdate{Resources: proto.CloneOf(u.view.GetLinuxResources())},
		}
	}
	if err := mergeUpdate(m, up, next); err != nil {
		return err
	}
	u.merged = next
	u.view.LinuxResources = proto.CloneOf(next.GetLinux().GetResources())
	return nil
}
