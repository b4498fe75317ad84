// Package sound says whether what a plugin wants can be at all, whatever the container.
//
// It finds texts that no system call takes and values that mean nothing, and names the field as
// NRI's messages do. Whether the plugin may want it, whether another plugin wants it too and
// whether the host can do it are other questions. The package is pure.
package sound

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// maxID bounds the id of a container in bytes; ours have 64.
const maxID = 256

// maxShown is how much of a text errors show, in characters.
const maxShown = 100

// Answer checks the adjustment, the updates and the evictions in the answer to a request. The
// error names the first field that cannot be.
func Answer(a *nri.ContainerAdjustment, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) error {
	if err := Adjustment(a); err != nil {
		return fmt.Errorf("adjust.%w", err)
	}
	for i, u := range updates {
		if err := Update(u); err != nil {
			return fmt.Errorf("update[%d].%w", i, err)
		}
	}
	for i, e := range evictions {
		if err := Eviction(e); err != nil {
			return fmt.Errorf("evict[%d].%w", i, err)
		}
	}
	return nil
}

// Adjustment checks what a container is to be made with.
func Adjustment(a *nri.ContainerAdjustment) error {
	if a == nil {
		return nil
	}
	c := checker{}
	c.texts(a)
	for _, k := range slices.Sorted(maps.Keys(a.GetAnnotations())) {
		c.key("annotations", k)
	}
	for i, m := range a.GetMounts() {
		c.absolute(fmt.Sprintf("mounts[%d].destination", i), nri.ClearRemovalMarker(m.GetDestination()))
	}
	for i, e := range a.GetEnv() {
		name := nri.ClearRemovalMarker(e.GetKey())
		c.unless(name != "" && !strings.Contains(name, "="), fmt.Sprintf("env[%d].key", i), e.GetKey(),
			"is no name of a variable: not empty, without \"=\"")
	}
	c.hooks(a.GetHooks())
	for i, l := range a.GetRlimits() {
		field := fmt.Sprintf("rlimits[%d]", i)
		c.unless(l.GetType() != "", field+".type", l.GetType(), "is no type of a limit, such as \"RLIMIT_NOFILE\"")
		c.unless(l.GetSoft() <= l.GetHard(), field+".soft", l.GetSoft(), "is above the hard limit")
	}
	for i, d := range a.GetCDIDevices() {
		c.unless(d.GetName() != "", fmt.Sprintf("CDI_devices[%d].name", i), d.GetName(), "is no name of a device, such as \"vendor.com/class=name\"")
	}
	c.linux(a.GetLinux())
	return c.err
}

// Update checks what a container is to be changed to.
func Update(u *nri.ContainerUpdate) error {
	c := checker{}
	c.id(u.GetContainerId())
	c.texts(u)
	c.resources("linux.resources", u.GetLinux().GetResources())
	return c.err
}

// Eviction checks what is to be ended.
func Eviction(e *nri.ContainerEviction) error {
	c := checker{}
	c.id(e.GetContainerId())
	c.texts(e)
	return c.err
}

// checker keeps the first thing that is wrong.
type checker struct{ err error }

func (c *checker) unless(ok bool, field string, value any, wrong string) {
	if ok || c.err != nil {
		return
	}
	if s, text := value.(string); text {
		value = fmt.Sprintf("%.*q", maxShown, s)
	}
	c.err = fmt.Errorf("%s: %v %s", field, value, wrong)
}

// texts checks every string of a message, keys of maps included. Only a message with a wrong one
// is walked with the names of its fields, which takes long: each answer of each plugin is checked.
func (c *checker) texts(m proto.Message) {
	if c.err != nil || clean(m.ProtoReflect()) {
		return
	}
	check := func(field, s string) {
		c.unless(utf8.ValidString(s), field, s, "is not valid UTF-8")
		c.unless(!strings.Contains(s, "\x00"), field, s, "has a byte of value zero")
	}
	err := protorange.Range(m.ProtoReflect(), func(p protopath.Values) error {
		last := p.Index(-1)
		field := strings.TrimPrefix(p.Path[1:].String(), ".")
		if last.Step.Kind() == protopath.MapIndexStep {
			if k, text := last.Step.MapIndex().Interface().(string); text {
				check(field, k)
			}
		}
		if s, text := last.Value.Interface().(string); text {
			check(field, s)
		}
		if c.err != nil {
			return protorange.Terminate
		}
		return nil
	})
	if err != nil && c.err == nil {
		c.err = err
	}
}

// clean reports whether all texts of a message are sound.
func clean(m protoreflect.Message) bool {
	ok := true
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
				ok = cleanValue(f.MapKey(), k.Value()) && cleanValue(f.MapValue(), v)
				return ok
			})
		case f.IsList():
			for i := 0; ok && i < v.List().Len(); i++ {
				ok = cleanValue(f, v.List().Get(i))
			}
		default:
			ok = cleanValue(f, v)
		}
		return ok
	})
	return ok
}

func cleanValue(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
	switch f.Kind() {
	case protoreflect.StringKind:
		s := v.String()
		return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0
	case protoreflect.MessageKind:
		return clean(v.Message())
	default:
		return true
	}
}

func (c *checker) id(id string) {
	c.unless(id != "" && len(id) <= maxID, "container_id", id, fmt.Sprintf("is no id of a container: not empty, at most %d bytes", maxID))
}

func (c *checker) key(field, key string) {
	c.unless(nri.ClearRemovalMarker(key) != "", field, key, "is an empty key")
}

func (c *checker) absolute(field, p string) {
	c.unless(path.IsAbs(p), field, p, "is not an absolute path")
}

func (c *checker) hooks(h *nri.Hooks) {
	for _, of := range [...]struct {
		name  string
		hooks []*nri.Hook
	}{
		{"prestart", h.GetPrestart()},
		{"create_runtime", h.GetCreateRuntime()},
		{"create_container", h.GetCreateContainer()},
		{"start_container", h.GetStartContainer()},
		{"poststart", h.GetPoststart()},
		{"poststop", h.GetPoststop()},
	} {
		for i, hook := range of.hooks {
			field := fmt.Sprintf("hooks.%s[%d]", of.name, i)
			c.absolute(field+".path", hook.GetPath())
			if t := hook.GetTimeout(); t != nil {
				c.unless(t.GetValue() > 0, field+".timeout", t.GetValue(), "is no time limit in seconds, which is above zero")
			}
		}
	}
}

func (c *checker) linux(l *nri.LinuxContainerAdjustment) {
	if l == nil {
		return
	}
	for i, d := range l.GetDevices() {
		field := fmt.Sprintf("linux.devices[%d]", i)
		p, removal := nri.IsMarkedForRemoval(d.GetPath())
		c.absolute(field+".path", p)
		if removal {
			continue
		}
		c.unless(slices.Contains([]string{"b", "c", "u", "p"}, d.GetType()), field+".type", d.GetType(), "is no type of a device: \"b\", \"c\", \"u\" or \"p\"")
		c.unless(d.GetMajor() >= 0, field+".major", d.GetMajor(), "is below zero")
		c.unless(d.GetMinor() >= 0, field+".minor", d.GetMinor(), "is below zero")
	}
	for i, n := range l.GetNamespaces() {
		field := fmt.Sprintf("linux.namespaces[%d]", i)
		c.unless(nri.ClearRemovalMarker(n.GetType()) != "", field+".type", n.GetType(), "is no type of a namespace, such as \"network\"")
		if n.GetPath() != "" {
			c.absolute(field+".path", n.GetPath())
		}
	}
	for _, k := range slices.Sorted(maps.Keys(l.GetSysctl())) {
		c.key("linux.sysctl", k)
	}
	for _, k := range slices.Sorted(maps.Keys(l.GetNetDevices())) {
		c.key("linux.net_devices", k)
	}
	if v := l.GetOomScoreAdj(); v != nil {
		c.unless(v.GetValue() >= -1000 && v.GetValue() <= 1000, "linux.oom_score_adj", v.GetValue(), "is not between -1000 and 1000")
	}
	if p := l.GetIoPriority(); p != nil {
		c.unless(p.GetPriority() >= 0 && p.GetPriority() <= 7, "linux.io_priority.priority", p.GetPriority(), "is not between 0 and 7")
	}
	c.resources("linux.resources", l.GetResources())
}

// resources checks cgroup values. Minus one stands for "no limit" where there is a limit.
func (c *checker) resources(field string, r *nri.LinuxResources) {
	m, cpu := r.GetMemory(), r.GetCpu()
	for _, limit := range [...]struct {
		name string
		v    *nri.OptionalInt64
	}{
		{"memory.limit", m.GetLimit()},
		{"memory.reservation", m.GetReservation()},
		{"memory.swap", m.GetSwap()},
		{"memory.kernel", m.GetKernel()},
		{"memory.kernel_tcp", m.GetKernelTcp()},
		{"cpu.quota", cpu.GetQuota()},
	} {
		c.unless(limit.v.GetValue() >= -1, field+"."+limit.name, limit.v.GetValue(), "is below -1, which stands for no limit")
	}
	c.unless(r.GetPids().GetLimit() >= -1, field+".pids.limit", r.GetPids().GetLimit(), "is below -1, which stands for no limit")
	for i, l := range r.GetHugepageLimits() {
		c.unless(l.GetPageSize() != "", fmt.Sprintf("%s.hugepage_limits[%d].page_size", field, i), l.GetPageSize(), "is no size of a page, such as \"2MB\"")
	}
	for _, k := range slices.Sorted(maps.Keys(r.GetUnified())) {
		c.key(field+".unified", k)
	}
}
