// Package nrispec is the way of specifications to NRI plugins and back: how plugins see pods and
// containers, and how what they want changed is applied. It keeps no state; all of it may be
// called concurrently.
package nrispec

import (
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/runtime-tools/generate"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/device"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/process"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
)

// Node is what adjustments draw on.
type Node struct {
	Host host.Facts
	// InjectCDI adds CDI devices to a specification; nil means that CDI is not available.
	InjectCDI func(*specs.Spec, []string) error
	// Classes are the configured classes of RDT and block I/O; nil means that there are none.
	Classes Classes
}

// Classes returns the classes of resources by their names.
type Classes interface {
	RDTClass(name string) (*specs.LinuxIntelRdt, error)
	BlockIOClass(name string) (*specs.LinuxBlockIO, error)
}

// Adjust returns a specification with what NRI plugins want changed in a container. The one
// that it is given stays as it is, and shares what no adjustment changes with the result.
// Errors: ErrInvalidArgument, ErrFailedPrecondition for what the host or the configuration
// cannot do.
func (n Node) Adjust(given *specs.Spec, adj *nri.ContainerAdjustment) (*specs.Spec, error) {
	if adj == nil {
		return given, nil
	}
	resources, err := resource.FromNRI(adj.GetLinux().GetResources(), n.Host)
	if err != nil {
		return nil, fmt.Errorf("NRI adjustment of resources: %w", err)
	}
	spec := adjustable(given)
	if err := n.adjustClasses(spec, adj.GetLinux().GetResources()); err != nil {
		return nil, fmt.Errorf("NRI adjustment: %w", err)
	}
	if err := generator(spec, n.InjectCDI).Adjust(withoutOurs(adj)); err != nil {
		return nil, fmt.Errorf("NRI adjustment: %w", classified(err))
	}
	resource.Merge(spec.Linux.Resources, resources)
	for _, l := range adj.GetRlimits() {
		process.SetRlimit(spec.Process, l.GetType(), n.Host.ClampRlimit(l.GetType(), host.Rlimit{Soft: l.GetSoft(), Hard: l.GetHard()}))
	}
	if adj.GetLinux().GetOomScoreAdj() != nil {
		spec.Process.OOMScoreAdj = new(n.Host.ClampOOMScore(int(adj.GetLinux().GetOomScoreAdj().GetValue())))
	}
	if p := adj.GetLinux().GetSeccompPolicy(); p != nil && p.GetDefaultErrno() != nil {
		spec.Linux.Seccomp.DefaultErrnoRet = new(uint(p.GetDefaultErrno().GetValue()))
	}
	if err := supported(spec, adj.GetLinux(), n.Host); err != nil {
		return nil, err
	}
	n.Host.Groups.Confine(spec.Linux)
	return spec, nil
}

// adjustClasses sets the classes that plugins choose, which replace what annotations chose. An
// empty name takes a class away; no name leaves it alone.
func (n Node) adjustClasses(spec *specs.Spec, r *nri.LinuxResources) error {
	block, rdt := r.GetBlockioClass(), r.GetRdtClass()
	if (block.GetValue() != "" || rdt.GetValue() != "") && n.Classes == nil {
		return fmt.Errorf("block I/O class %q, RDT class %q: no classes are configured: %w", block.GetValue(), rdt.GetValue(), errdefs.ErrFailedPrecondition)
	}
	switch {
	case block == nil:
	case block.GetValue() == "":
		spec.Linux.Resources.BlockIO = nil
	default:
		values, err := n.Classes.BlockIOClass(block.GetValue())
		if err != nil {
			return err
		}
		spec.Linux.Resources.BlockIO = values
	}
	switch {
	case rdt == nil:
	case rdt.GetValue() == "":
		spec.Linux.IntelRdt = nil
	default:
		values, err := n.Classes.RDTClass(rdt.GetValue())
		if err != nil {
			return err
		}
		spec.Linux.IntelRdt = values
	}
	return nil
}

// adjustable copies a specification as far as an adjustment may reach into it, and makes the
// parts that are missing. The rest is shared; the system calls of a seccomp profile are most
// of it.
func adjustable(given *specs.Spec) *specs.Spec {
	spec := copyOf(given)
	spec.Annotations, spec.Mounts = maps.Clone(spec.Annotations), slices.Clone(spec.Mounts)
	if spec.Hooks != nil {
		spec.Hooks = copyOf(spec.Hooks)
	}
	p := copyOf(spec.Process)
	p.Env, p.Rlimits, p.User.AdditionalGids = slices.Clone(p.Env), slices.Clone(p.Rlimits), slices.Clone(p.User.AdditionalGids)
	spec.Process = p
	l := copyOf(spec.Linux)
	l.Devices, l.Namespaces = slices.Clone(l.Devices), slices.Clone(l.Namespaces)
	l.Sysctl, l.NetDevices = maps.Clone(l.Sysctl), maps.Clone(l.NetDevices)
	if l.IntelRdt != nil {
		l.IntelRdt = copyOf(l.IntelRdt)
	}
	if l.Seccomp != nil {
		l.Seccomp = copyOf(l.Seccomp)
	}
	r := copyOf(l.Resources)
	r.Devices, r.HugepageLimits, r.Unified = slices.Clone(r.Devices), slices.Clone(r.HugepageLimits), maps.Clone(r.Unified)
	if r.CPU != nil {
		r.CPU = copyOf(r.CPU)
	}
	if r.Memory != nil {
		r.Memory = copyOf(r.Memory)
	}
	if r.Pids != nil {
		r.Pids = copyOf(r.Pids)
	}
	l.Resources = r
	spec.Linux = l
	return spec
}

// copyOf returns a copy of what p points at; of nothing, an empty one.
func copyOf[T any](p *T) *T {
	if p == nil {
		return new(T)
	}
	return new(*p)
}

// withoutOurs returns an adjustment without the parts that the generator of the NRI module
// applies wrongly or not at all and that [Node.Adjust] applies itself: cgroup values (it knows
// one of eight memory values and forces swap), limits (it adds a second one of a type) and
// the out-of-memory score (it knows no lower bound). The mark that a plugin puts before
// arguments to replace another plugin's is taken off.
func withoutOurs(adj *nri.ContainerAdjustment) *nri.ContainerAdjustment {
	out := proto.CloneOf(adj)
	out.Rlimits = nil
	if len(out.GetArgs()) > 0 && out.GetArgs()[0] == "" {
		out.Args = out.GetArgs()[1:]
	}
	if out.GetLinux() != nil {
		out.Linux.Resources = nil
		out.Linux.OomScoreAdj = nil
	}
	return out
}

func generator(spec *specs.Spec, inject func(*specs.Spec, []string) error) *generate.Generator {
	return generate.SpecGenerator(&editor{spec: spec},
		generate.WithCDIDeviceInjector(func(s *specs.Spec, names []string) error {
			return device.InjectCDI(s, names, inject)
		}))
}

// supported refuses what a specification asks for and the host cannot do, which an OCI
// runtime would only say when the container starts.
func supported(spec *specs.Spec, adj *nri.LinuxContainerAdjustment, on host.Facts) error {
	if spec.Linux.IntelRdt != nil && !on.RDT {
		field := "linux.rdt"
		if adj.GetResources().GetRdtClass() != nil {
			field = "linux.resources.rdt_class"
		}
		return fmt.Errorf("NRI adjustment: %s: RDT is not mounted on the host: %w", field, errdefs.ErrFailedPrecondition)
	}
	if s := spec.Linux.Seccomp; s != nil && !on.Seccomp {
		return fmt.Errorf("NRI adjustment: linux.seccomp_policy: the kernel lacks seccomp: %w", errdefs.ErrFailedPrecondition)
	}
	return nil
}

// classified gives an error of the generator a class unless it has one.
func classified(err error) error {
	for _, is := range []func(error) bool{errdefs.IsInvalidArgument, errdefs.IsFailedPrecondition, errdefs.IsNotFound} {
		if is(err) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
}

// editor is the elementary operations on a specification that the generator of the NRI
// module is built on.
type editor struct {
	spec *specs.Spec
	env  *process.Environment // of the process, once it has been changed
}

var _ generate.UnderlyingGenerator = (*editor)(nil)

func (e *editor) Spec() *specs.Spec { return e.spec }

func (e *editor) AddAnnotation(key, value string) {
	if e.spec.Annotations == nil {
		e.spec.Annotations = make(map[string]string)
	}
	e.spec.Annotations[key] = value
}

func (e *editor) RemoveAnnotation(key string) { delete(e.spec.Annotations, key) }

func (e *editor) AddDevice(dev specs.LinuxDevice) {
	e.spec.Linux.Devices = append(e.spec.Linux.Devices, dev)
}

// RemoveDevice removes a device node and the rules that let the container use it.
func (e *editor) RemoveDevice(path string) {
	devices := &e.spec.Linux.Devices
	i := slices.IndexFunc(*devices, func(d specs.LinuxDevice) bool { return d.Path == path })
	if i < 0 {
		return
	}
	gone := (*devices)[i]
	*devices = slices.Delete(*devices, i, i+1)
	rules := &e.spec.Linux.Resources.Devices
	*rules = slices.DeleteFunc(*rules, func(r specs.LinuxDeviceCgroup) bool {
		return r.Allow && r.Type == gone.Type && r.Major != nil && *r.Major == gone.Major && r.Minor != nil && *r.Minor == gone.Minor
	})
}

func (e *editor) AddLinuxResourcesDevice(allow bool, kind string, major, minor *int64, access string) {
	e.spec.Linux.Resources.Devices = append(e.spec.Linux.Resources.Devices,
		specs.LinuxDeviceCgroup{Allow: allow, Type: kind, Major: major, Minor: minor, Access: access})
}

func (e *editor) AddOrReplaceLinuxNamespace(kind, path string) error {
	if kind == "" {
		return fmt.Errorf("namespace without a type: %w", errdefs.ErrInvalidArgument)
	}
	e.removeNamespace(kind)
	e.spec.Linux.Namespaces = append(e.spec.Linux.Namespaces,
		specs.LinuxNamespace{Type: specs.LinuxNamespaceType(kind), Path: path})
	return nil
}

func (e *editor) RemoveLinuxNamespace(kind string) error {
	e.removeNamespace(kind)
	return nil
}

func (e *editor) removeNamespace(kind string) {
	e.spec.Linux.Namespaces = slices.DeleteFunc(e.spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return string(n.Type) == kind
	})
}

func (e *editor) hooks() *specs.Hooks {
	if e.spec.Hooks == nil {
		e.spec.Hooks = &specs.Hooks{}
	}
	return e.spec.Hooks
}

func (e *editor) AddPreStartHook(h specs.Hook) {
	hooks := e.hooks()
	hooks.Prestart = append(hooks.Prestart, h) //nolint:staticcheck // plugins may still set it
}

func (e *editor) AddPostStartHook(h specs.Hook) {
	e.hooks().Poststart = append(e.hooks().Poststart, h)
}

func (e *editor) AddPostStopHook(h specs.Hook) {
	e.hooks().Poststop = append(e.hooks().Poststop, h)
}

func (e *editor) AddProcessEnv(name, value string) {
	if e.env == nil {
		e.env = process.NewEnvironment(e.spec.Process.Env)
	}
	e.env.Set(name + "=" + value)
	e.spec.Process.Env = e.env.List()
}

func (e *editor) ClearProcessEnv() { e.env, e.spec.Process.Env = nil, nil }

func (e *editor) SetProcessArgs(args []string) { e.spec.Process.Args = slices.Clone(args) }

func (e *editor) SetProcessOOMScoreAdj(adj int) { e.spec.Process.OOMScoreAdj = &adj }

func (e *editor) AddMount(m specs.Mount) { e.spec.Mounts = append(e.spec.Mounts, m) }

func (e *editor) ClearMounts() { e.spec.Mounts = nil }

func (e *editor) Mounts() []specs.Mount { return e.spec.Mounts }

func (e *editor) RemoveMount(destination string) {
	e.spec.Mounts = slices.DeleteFunc(slices.Clone(e.spec.Mounts), func(m specs.Mount) bool { return m.Destination == destination })
}

func (e *editor) AddLinuxSysctl(key, value string) {
	if e.spec.Linux.Sysctl == nil {
		e.spec.Linux.Sysctl = make(map[string]string)
	}
	e.spec.Linux.Sysctl[key] = value
}

func (e *editor) RemoveLinuxSysctl(key string) { delete(e.spec.Linux.Sysctl, key) }

func (e *editor) SetLinuxCgroupsPath(path string) { e.spec.Linux.CgroupsPath = path }

func (e *editor) SetLinuxRootPropagation(p string) error {
	e.spec.Linux.RootfsPropagation = p
	return nil
}

// The remaining operations belong to the cgroup values, which the generator is never given.

func (e *editor) AddLinuxResourcesHugepageLimit(size string, limit uint64) {
	e.merge(&specs.LinuxResources{HugepageLimits: []specs.LinuxHugepageLimit{{Pagesize: size, Limit: limit}}})
}

func (e *editor) AddLinuxResourcesUnified(key, value string) {
	e.merge(&specs.LinuxResources{Unified: map[string]string{key: value}})
}

func (e *editor) SetLinuxResourcesCPUCpus(cpus string) { e.cpu(specs.LinuxCPU{Cpus: cpus}) }
func (e *editor) SetLinuxResourcesCPUMems(mems string) { e.cpu(specs.LinuxCPU{Mems: mems}) }

func (e *editor) SetLinuxResourcesCPUPeriod(v uint64) { e.cpu(specs.LinuxCPU{Period: &v}) }
func (e *editor) SetLinuxResourcesCPUQuota(v int64)   { e.cpu(specs.LinuxCPU{Quota: &v}) }
func (e *editor) SetLinuxResourcesCPUShares(v uint64) { e.cpu(specs.LinuxCPU{Shares: &v}) }

func (e *editor) SetLinuxResourcesCPURealtimePeriod(v uint64) {
	e.cpu(specs.LinuxCPU{RealtimePeriod: &v})
}

func (e *editor) SetLinuxResourcesCPURealtimeRuntime(v int64) {
	e.cpu(specs.LinuxCPU{RealtimeRuntime: &v})
}

func (e *editor) SetLinuxResourcesMemoryLimit(v int64) {
	e.merge(&specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &v}})
}

func (e *editor) SetLinuxResourcesMemorySwap(v int64) {
	e.merge(&specs.LinuxResources{Memory: &specs.LinuxMemory{Swap: &v}})
}

func (e *editor) cpu(c specs.LinuxCPU) { e.merge(&specs.LinuxResources{CPU: &c}) }

func (e *editor) merge(r *specs.LinuxResources) { resource.Merge(e.spec.Linux.Resources, r) }
