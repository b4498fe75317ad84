package adjust

import (
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// State is a merge that some plugins have passed, to be gone on with elsewhere. Its
// messages are not shared with the merge.
type State struct {
	Container *nri.Container // as the next plugin is to see it
	Adjust    *nri.ContainerAdjustment
	Owners    *nri.OwningPlugins
	Updates   []*nri.ContainerUpdate // of other containers
	Evictions []*nri.ContainerEviction
	Update    *nri.ContainerUpdate // of the container itself; nil if no plugin has touched it
}

// State returns the merge so far.
func (c *Create) State() State {
	s := c.others.State()
	s.Container, s.Adjust = proto.CloneOf(c.Request().GetContainer()), proto.CloneOf(c.adjust)
	return s
}

// ResumeCreate goes on with a merge for the same request.
func ResumeCreate(req *nri.CreateContainerRequest, s State) *Create {
	c := NewCreate(req)
	if s.Container != nil {
		c.Prepare()
		c.view.Container = proto.CloneOf(s.Container)
	}
	if s.Adjust != nil {
		c.adjust = proto.CloneOf(s.Adjust)
	}
	c.others.resume(s)
	c.owners = c.others.owners
	return c
}

// State returns the merge so far.
func (u *Update) State() State {
	s := u.others.State()
	s.Update = proto.CloneOf(u.merged)
	return s
}

// ResumeUpdate goes on with a merge for the same request.
func ResumeUpdate(req *nri.UpdateContainerRequest, s State) *Update {
	u := NewUpdate(req)
	u.others.resume(s)
	if s.Update != nil {
		u.merged = proto.CloneOf(s.Update)
		u.view.LinuxResources = proto.CloneOf(s.Update.GetLinux().GetResources())
	}
	return u
}

// State returns the merge so far.
func (o *Others) State() State {
	s := State{Owners: proto.CloneOf(o.owners)}
	for _, u := range o.updates {
		s.Updates = append(s.Updates, proto.CloneOf(u))
	}
	s.Evictions = append(s.Evictions, o.evictions...)
	return s
}

// ResumeOthers goes on with a merge.
func ResumeOthers(s State) *Others {
	o := NewOthers()
	o.resume(s)
	return o
}

func (o *Others) resume(s State) {
	if s.Owners != nil {
		o.owners = proto.CloneOf(s.Owners)
		ensure(&o.owners.Owners)
		for _, f := range o.owners.Owners {
			normalise(f)
		}
	}
	for _, u := range s.Updates {
		u = proto.CloneOf(u)
		o.updates = append(o.updates, u)
		o.byID[u.GetContainerId()] = u
	}
	for _, e := range s.Evictions {
		o.evicted[e.GetContainerId()] = true
		o.evictions = append(o.evictions, e)
	}
}
