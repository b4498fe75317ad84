// Package adjust merges what the plugins answer to one request.
//
// The plugins are applied one after the other, in the order in which they are called.
// Each of them sees the container with the changes of the earlier ones (Create.Request,
// Update.Request), and every field that a plugin sets is its own from then on: a second
// plugin that sets the same field fails the request, unless NRI lets it remove the
// earlier value first. The merged answer holds at most one entry for a key, either a
// value or a removal, so that it does not matter in which order it is carried out.
//
// The package is pure: no input or output, no time, no goroutines. Its values are not
// safe for concurrent use. It neither checks whether a plugin may touch a field nor
// calls plugins.
package adjust

import (
	"fmt"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

// Create merges the answers to one CreateContainer request.
type Create struct {
	pristine *nri.CreateContainerRequest
	view     *nri.CreateContainerRequest // nil as long as it is the pristine one
	adjust   *nri.ContainerAdjustment
	owners   *nri.OwningPlugins
	others   *Others
}

// NewCreate starts a merge. The request is never changed; it must not be changed by others
// either while the merge is used.
func NewCreate(req *nri.CreateContainerRequest) *Create {
	owners := nri.NewOwningPlugins()
	c := &Create{
		pristine: req,
		adjust:   &nri.ContainerAdjustment{},
		owners:   owners,
		others:   newOthers(owners),
	}
	c.others.creating = c.id()
	return c
}

func (c *Create) id() string { return c.pristine.GetContainer().GetId() }

// Prepare makes the copy that Apply changes, if it is not there yet. Apply does so by itself;
// Prepare is for when there is time.
func (c *Create) Prepare() {
	if c.view != nil {
		return
	}
	c.view = proto.CloneOf(c.pristine)
	if c.view.Container == nil {
		c.view.Container = &nri.Container{}
	}
}

// Request is what the next plugin is to see: the container with all changes so far.
// It is valid until the next Apply and must not be changed.
func (c *Create) Request() *nri.CreateContainerRequest {
	if c.view == nil {
		return c.pristine
	}
	return c.view
}

// Apply adds the answer of a plugin. The error names the plugin that had set the field
// before (errdefs.ErrConflict); the merge is of no use after an error.
func (c *Create) Apply(plugin string, resp *nri.CreateContainerResponse) error {
	m := &merge{
		plugin: plugin,
		owners: fieldOwners(c.owners, c.id()),
	}
	if err := c.apply(m, resp.GetAdjust()); err != nil {
		return fmt.Errorf("adjust container %q: %w", c.id(), err)
	}
	return c.others.Apply(plugin, resp.GetUpdate(), resp.GetEvict())
}

// Response is the merged answer. Its adjustment is nil if no plugin adjusted anything.
func (c *Create) Response() *nri.CreateContainerResponse {
	return &nri.CreateContainerResponse{
		Adjust: c.merged(),
		Update: c.others.Updates(),
		Evict:  c.others.Evictions(),
	}
}

// Validation is the request for validators: the container as it was asked for, the
// merged answer, the owner of each field and the plugins that were consulted.
func (c *Create) Validation(consulted []*nri.PluginInstance) *nri.ValidateContainerAdjustmentRequest {
	req := &nri.ValidateContainerAdjustmentRequest{
		Pod:       c.pristine.GetPod(),
		Container: c.pristine.GetContainer(),
		Owners:    c.owners,
		Plugins:   consulted,
	}
	req.AddResponse(c.Response())
	return req
}

func (c *Create) apply(m *merge, a *nri.ContainerAdjustment) error {
	if a == nil {
		return nil
	}
	c.Prepare()
	view := c.view.Container
	steps := []func() error{
		func() error { return m.annotations(a.Annotations, c.adjust, view) },
		func() error { return m.mounts(a.Mounts, c.adjust, view) },
		func() error { return m.env(a.Env, c.adjust, view) },
		func() error { return m.args(a.Args, c.adjust, view) },
		func() error { return m.hooks(a.Hooks, c.adjust, view) },
		func() error { return m.rlimits(a.Rlimits, c.adjust, view) },
		func() error { return m.cdiDevices(a.CDIDevices, c.adjust) },
		func() error { return c.applyLinux(m, a.Linux) },
	}
	return run(steps)
}

func (c *Create) applyLinux(m *merge, a *nri.LinuxContainerAdjustment) error {
	if a == nil {
		return nil
	}
	if c.adjust.Linux == nil {
		c.adjust.Linux = &nri.LinuxContainerAdjustment{}
	}
	if c.view.Container.Linux == nil {
		c.view.Container.Linux = &nri.LinuxContainer{}
	}
	to, view := c.adjust.Linux, c.view.Container.Linux
	steps := []func() error{
		func() error { return m.devices(a.Devices, to, view) },
		func() error { return m.namespaces(a.Namespaces, to, view) },
		func() error { return m.sysctl(a.Sysctl, to, view) },
		func() error { return m.netDevices(a.NetDevices, to, view) },
		func() error { return m.cgroupsPath(a.CgroupsPath, to, view) },
		func() error { return set(m, nri.Field_OomScoreAdj, a.OomScoreAdj, &to.OomScoreAdj, &view.OomScoreAdj) },
		func() error { return set(m, nri.Field_IoPriority, a.IoPriority, &to.IoPriority, &view.IoPriority) },
		func() error {
			return set(m, nri.Field_SeccompPolicy, a.SeccompPolicy, &to.SeccompPolicy, &view.SeccompPolicy)
		},
		func() error { return set(m, nri.Field_LinuxSched, a.Scheduler, &to.Scheduler, &view.Scheduler) },
		func() error { return set(m, nri.Field_MemoryPolicy, a.MemoryPolicy, &to.MemoryPolicy) },
		func() error { return m.rdt(a.Rdt, to, view) },
		func() error { return c.applyResources(m, a.Resources) },
	}
	return run(steps)
}

func (c *Create) applyResources(m *merge, a *nri.LinuxResources) error {
	if a == nil {
		return nil
	}
	to, view := c.adjust.Linux, c.view.Container.Linux
	if to.Resources == nil {
		to.Resources = &nri.LinuxResources{}
	}
	if view.Resources == nil {
		view.Resources = &nri.LinuxResources{}
	}
	if err := m.resources(a, to.Resources, view.Resources); err != nil {
		return err
	}
	// Rules of the device controller belong to creation alone: they add up and nobody
	// owns them.
	to.Resources.Devices = append(to.Resources.Devices, a.Devices...)
	view.Resources.Devices = append(view.Resources.Devices, a.Devices...)
	return nil
}

// merged is the adjustment without the empty messages that merging leaves behind. What
// a plugin has set to a zero value stays.
func (c *Create) merged() *nri.ContainerAdjustment {
	a := proto.CloneOf(c.adjust)
	if l := a.Linux; l != nil {
		if l.Resources != nil {
			prune(l.Resources)
		}
		l.Resources = nonEmpty(l.Resources)
		a.Linux = nonEmpty(l)
	}
	return nonEmpty(a)
}

func prune(r *nri.LinuxResources) {
	r.Memory = nonEmpty(r.Memory)
	r.Cpu = nonEmpty(r.Cpu)
}

func nonEmpty[M proto.Message](m M) M {
	if proto.Size(m) == 0 {
		var none M
		return none
	}
	return m
}

func run(steps []func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// fieldOwners returns the owners of a container's fields, which it creates if needed.
func fieldOwners(all *nri.OwningPlugins, id string) *nri.FieldOwners {
	f, ok := all.Owners[id]
	if !ok {
		f = nri.NewFieldOwners()
		all.Owners[id] = f
	}
	return f
}

// conflict marks an ownership error as one, keeping its text.
func conflict(err error) error {
	return fmt.Errorf("%w: %w", err, errdefs.ErrConflict)
}
