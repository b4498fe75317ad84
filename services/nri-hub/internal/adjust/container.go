package adjust

import (
	"path"
	"slices"
	"strings"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
)

func (m *merge) annotations(items map[string]string, to *nri.ContainerAdjustment, view *nri.Container) error {
	return dict(m, nri.Field_Annotations, items, &to.Annotations, &view.Annotations)
}

func (m *merge) mounts(items []*nri.Mount, to *nri.ContainerAdjustment, view *nri.Container) error {
	items = slices.Clone(items)
	for i, item := range items {
		if clean := cleaned(item.GetDestination()); clean != item.GetDestination() {
			items[i] = proto.CloneOf(item)
			items[i].Destination = clean
		}
	}
	return list(m, nri.Field_Mounts, items, (*nri.Mount).GetDestination, &to.Mounts, &view.Mounts)
}

// cleaned is the one spelling of an absolute path, removal marker and all: two plugins that
// mean the same place are in conflict however they write it.
func cleaned(p string) string {
	place, removal := nri.IsMarkedForRemoval(p)
	if !path.IsAbs(place) {
		return p
	}
	place = path.Clean(place)
	if removal {
		return nri.MarkForRemoval(place)
	}
	return place
}

func (m *merge) env(items []*nri.KeyValue, to *nri.ContainerAdjustment, view *nri.Container) error {
	if len(items) == 0 {
		return nil
	}
	// The container has its environment as "key=value" lines. What the plugins do not
	// touch must stay as it is, whatever it looks like.
	vars := make([]*nri.KeyValue, 0, len(view.Env))
	for _, line := range view.Env {
		k, v, _ := strings.Cut(line, "=")
		vars = append(vars, &nri.KeyValue{Key: k, Value: v})
	}
	if err := list(m, nri.Field_Env, items, (*nri.KeyValue).GetKey, &to.Env, &vars); err != nil {
		return err
	}
	touched := make(map[string]bool, len(items))
	for _, item := range items {
		touched[nri.ClearRemovalMarker(item.GetKey())] = true
	}
	lines := slices.DeleteFunc(view.Env, func(line string) bool {
		k, _, _ := strings.Cut(line, "=")
		return touched[k]
	})
	for _, v := range vars {
		if touched[v.GetKey()] {
			lines = append(lines, v.GetKey()+"="+v.GetValue())
		}
	}
	view.Env = lines
	return nil
}

// args replaces the arguments as a whole; an empty first element says that the plugin
// means to replace what another plugin has set.
func (m *merge) args(items []string, to *nri.ContainerAdjustment, view *nri.Container) error {
	if len(items) == 0 {
		return nil
	}
	if items[0] == "" {
		m.owners.ClearArgs(m.plugin)
		items = items[1:]
	}
	if err := m.own(nri.Field_Args); err != nil {
		return err
	}
	to.Args = slices.Clone(items)
	view.Args = slices.Clone(items)
	return nil
}

// hooks add up: nobody can remove or replace another's.
func (m *merge) hooks(h *nri.Hooks, to *nri.ContainerAdjustment, view *nri.Container) error {
	if h.Strip() == nil {
		return nil
	}
	for _, target := range []**nri.Hooks{&to.Hooks, &view.Hooks} {
		if *target == nil {
			*target = &nri.Hooks{}
		}
		t := *target
		t.Prestart = append(t.Prestart, h.Prestart...)
		t.CreateRuntime = append(t.CreateRuntime, h.CreateRuntime...)
		t.CreateContainer = append(t.CreateContainer, h.CreateContainer...)
		t.StartContainer = append(t.StartContainer, h.StartContainer...)
		t.Poststart = append(t.Poststart, h.Poststart...)
		t.Poststop = append(t.Poststop, h.Poststop...)
	}
	// Owners of hooks accumulate as "a,b"; there is no conflict to report.
	return m.owners.ClaimHooks(m.plugin)
}

func (m *merge) rlimits(items []*nri.POSIXRlimit, to *nri.ContainerAdjustment, view *nri.Container) error {
	return list(m, nri.Field_Rlimits, items, (*nri.POSIXRlimit).GetType, &to.Rlimits, &view.Rlimits)
}

// cdiDevices stay unresolved and are not shown to later plugins: what they stand for is
// known only where they are resolved.
func (m *merge) cdiDevices(items []*nri.CDIDevice, to *nri.ContainerAdjustment) error {
	var hidden []*nri.CDIDevice
	return list(m, nri.Field_CdiDevices, items, (*nri.CDIDevice).GetName, &to.CDIDevices, &hidden)
}

func (m *merge) devices(items []*nri.LinuxDevice, to *nri.LinuxContainerAdjustment, view *nri.LinuxContainer) error {
	return list(m, nri.Field_Devices, items, (*nri.LinuxDevice).GetPath, &to.Devices, &view.Devices)
}

// namespaces are owned by type, and a removal owns its type too: adding a namespace
// that another plugin took away is a conflict.
func (m *merge) namespaces(items []*nri.LinuxNamespace, to *nri.LinuxContainerAdjustment, view *nri.LinuxContainer) error {
	items = slices.DeleteFunc(slices.Clone(items), func(n *nri.LinuxNamespace) bool { return n == nil })
	for _, n := range items {
		if err := m.ownEntry(nri.Field_Namespace, nri.ClearRemovalMarker(n.GetType())); err != nil {
			return err
		}
	}
	return list(m, nri.Field_Namespace, items, (*nri.LinuxNamespace).GetType, &to.Namespaces, &view.Namespaces)
}

func (m *merge) sysctl(items map[string]string, to *nri.LinuxContainerAdjustment, view *nri.LinuxContainer) error {
	return dict(m, nri.Field_Sysctl, items, &to.Sysctl, &view.Sysctl)
}

func (m *merge) netDevices(items map[string]*nri.LinuxNetDevice, to *nri.LinuxContainerAdjustment, view *nri.LinuxContainer) error {
	return dict(m, nri.Field_LinuxNetDevices, items, &to.NetDevices, &view.NetDevices)
}

func (m *merge) cgroupsPath(v string, to *nri.LinuxContainerAdjustment, view *nri.LinuxContainer) error {
	return setString(m, nri.Field_CgroupsPath, v, &to.CgroupsPath, &view.CgroupsPath)
}

// rdt is merged field by field; "remove" takes away what earlier plugins and the
// runtime have set, before the plugin's own fields.
func (m *merge) rdt(a *nri.LinuxRdt, to *nri.LinuxContainerAdjustment, view *nri.LinuxContainer) error {
	if a.Strip() == nil {
		return nil
	}
	if a.GetRemove() {
		m.owners.ClearRdt(m.plugin)
		to.Rdt = &nri.LinuxRdt{Remove: true}
		view.Rdt = nil
	}
	if a.ClosId == nil && a.Schemata == nil && a.EnableMonitoring == nil {
		return nil
	}
	if to.Rdt == nil {
		to.Rdt = &nri.LinuxRdt{}
	}
	if view.Rdt == nil {
		view.Rdt = &nri.LinuxRdt{}
	}
	err := run([]func() error{
		func() error { return set(m, nri.Field_RdtClosID, a.ClosId, &to.Rdt.ClosId, &view.Rdt.ClosId) },
		func() error { return set(m, nri.Field_RdtSchemata, a.Schemata, &to.Rdt.Schemata, &view.Rdt.Schemata) },
		func() error {
			return set(m, nri.Field_RdtEnableMonitoring, a.EnableMonitoring, &to.Rdt.EnableMonitoring, &view.Rdt.EnableMonitoring)
		},
	})
	// With every field set there is nothing left to remove.
	if to.Rdt.ClosId != nil && to.Rdt.Schemata != nil && to.Rdt.EnableMonitoring != nil {
		to.Rdt.Remove = false
	}
	return err
}
