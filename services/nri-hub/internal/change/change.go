// Package change tells what a plugin's answer would change of a container, field by field.
//
// Fields are named as in NRI's messages, with dots: "env", "mounts",
// "linux.resources.cpu.shares". A list or map with keys has one change for each key. The
// same names are used to allow and to record changes. The package is pure; it neither
// decides nor merges.
package change

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Evict is the field of an eviction.
const Evict = "evict"

// maxText bounds a value in bytes; what is longer is cut.
const maxText = 1024

// Change is one field, or one entry of one, that a plugin sets or removes.
type Change struct {
	Field string `json:"field"`
	// Key is the entry, such as the name of a variable; empty for a field as a whole.
	Key string `json:"key,omitempty"`
	// Old and New are texts for people; Old is empty if there was nothing.
	Old string `json:"old,omitempty"`
	New string `json:"new,omitempty"`
	// Removed says that the entry is taken away.
	Removed bool `json:"removed,omitempty"`
}

// Of lists what an adjustment changes of a container, in a fixed order.
func Of(c *nri.Container, a *nri.ContainerAdjustment) []Change {
	if a == nil {
		return nil
	}
	var w walker
	if len(a.GetEnv()) > 0 {
		w.env = environment(c.GetEnv())
	}
	w.message("", a.ProtoReflect(), c.ProtoReflect())
	return w.sorted()
}

// OfResources lists what an update changes of resources; before may be nil.
func OfResources(before, after *nri.LinuxResources) []Change {
	if after == nil {
		return nil
	}
	var w walker
	w.message("linux.resources", after.ProtoReflect(), before.ProtoReflect())
	return w.sorted()
}

// Strip takes the fields out of an adjustment that keep refuses.
func Strip(a *nri.ContainerAdjustment, keep func(field string) bool) {
	if a != nil {
		strip("", a.ProtoReflect(), keep)
	}
}

// StripResources is Strip for an update.
func StripResources(r *nri.LinuxResources, keep func(field string) bool) {
	if r != nil {
		strip("linux.resources", r.ProtoReflect(), keep)
	}
}

// Fields are the names of everything that an adjustment, an update or an eviction can
// change, with those of the groups.
func Fields() []string {
	names := []string{Evict}
	describe("", (&nri.ContainerAdjustment{}).ProtoReflect().Descriptor(), &names)
	slices.Sort(names)
	return names
}

func describe(path string, d protoreflect.MessageDescriptor, names *[]string) {
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		name := join(path, f)
		*names = append(*names, name)
		if group(f) {
			describe(name, f.Message(), names)
		}
	}
}

func join(path string, f protoreflect.FieldDescriptor) string {
	name := strings.ToLower(string(f.Name()))
	if path == "" {
		return name
	}
	return path + "." + name
}

// group reports whether a message is a collection of fields; any other is a value.
func group(f protoreflect.FieldDescriptor) bool {
	if f.Message() == nil || f.IsList() || f.IsMap() {
		return false
	}
	switch f.Name() {
	case "linux", "resources", "memory", "cpu", "pids", "hooks", "rdt":
		return true
	default:
		return false
	}
}

func strip(path string, m protoreflect.Message, keep func(string) bool) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		name := join(path, f)
		switch {
		case group(f):
			strip(name, v.Message(), keep)
			empty := true
			v.Message().Range(func(protoreflect.FieldDescriptor, protoreflect.Value) bool { empty = false; return false })
			if empty {
				m.Clear(f)
			}
		case !keep(name):
			m.Clear(f)
		}
		return true
	})
}

type walker struct {
	changes []Change
	env     map[string]string
}

func (w *walker) sorted() []Change {
	slices.SortStableFunc(w.changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(a.Field, b.Field), cmp.Compare(a.Key, b.Key))
	})
	return w.changes
}

func (w *walker) add(field, key, before, after string) {
	plain, removed := nri.IsMarkedForRemoval(key)
	if removed {
		after = ""
	}
	w.changes = append(w.changes, Change{Field: field, Key: plain, Old: cut(before), New: cut(after), Removed: removed})
}

func (w *walker) message(path string, after, before protoreflect.Message) {
	after.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		name := join(path, f)
		old, had := lookup(before, f)
		switch {
		case group(f):
			var next protoreflect.Message
			if had {
				next = old.Message()
			}
			w.message(name, v.Message(), next)
		case f.IsMap():
			v.Map().Range(func(k protoreflect.MapKey, item protoreflect.Value) bool {
				w.add(name, k.String(), mapEntry(old, had, nri.ClearRemovalMarker(k.String())), text(item))
				return true
			})
		case f.IsList() && f.Message() != nil:
			for i := range v.List().Len() {
				item := v.List().Get(i)
				key := keyOf(item.Message())
				w.add(name, key, w.listEntry(name, old, had, nri.ClearRemovalMarker(key)), text(item))
			}
		default:
			before := ""
			if had {
				before = fieldText(f, old)
			}
			w.add(name, "", before, fieldText(f, v))
		}
		return true
	})
}

// lookup finds the field of the same name and kind in the message before.
func lookup(before protoreflect.Message, f protoreflect.FieldDescriptor) (protoreflect.Value, bool) {
	if before == nil || !before.IsValid() {
		return protoreflect.Value{}, false
	}
	same := before.Descriptor().Fields().ByName(f.Name())
	if same == nil || same.Kind() != f.Kind() || same.Cardinality() != f.Cardinality() || !before.Has(same) {
		return protoreflect.Value{}, false
	}
	return before.Get(same), true
}

func mapEntry(old protoreflect.Value, had bool, key string) string {
	if !had {
		return ""
	}
	v := old.Map().Get(protoreflect.ValueOfString(key).MapKey())
	if !v.IsValid() {
		return ""
	}
	return text(v)
}

func (w *walker) listEntry(field string, old protoreflect.Value, had bool, key string) string {
	if field == "env" {
		return w.env[key]
	}
	if !had || key == "" {
		return ""
	}
	for i := range old.List().Len() {
		if item := old.List().Get(i); keyOf(item.Message()) == key {
			return text(item)
		}
	}
	return ""
}

// environment is the container's as it is in force: of two lines the last one counts.
func environment(lines []string) map[string]string {
	env := make(map[string]string, len(lines))
	for _, l := range lines {
		k, v, _ := strings.Cut(l, "=")
		env[k] = v
	}
	return env
}

// keyOf is what tells an element of a list from the others.
func keyOf(m protoreflect.Message) string {
	var name protoreflect.Name
	switch m.Interface().(type) {
	case *nri.Mount:
		name = "destination"
	case *nri.KeyValue:
		name = "key"
	case *nri.POSIXRlimit, *nri.LinuxNamespace:
		name = "type"
	case *nri.LinuxDevice, *nri.Hook:
		name = "path"
	case *nri.HugepageLimit:
		name = "page_size"
	case *nri.CDIDevice:
		name = "name"
	default:
		return ""
	}
	return m.Get(m.Descriptor().Fields().ByName(name)).String()
}

func fieldText(f protoreflect.FieldDescriptor, v protoreflect.Value) string {
	if !f.IsList() {
		return text(v)
	}
	items := make([]string, v.List().Len())
	for i := range items {
		items[i] = text(v.List().Get(i))
	}
	return "[" + strings.Join(items, " ") + "]"
}

// text is a value for people: messages as "name=value" pairs in the order of their fields.
func text(v protoreflect.Value) string {
	m, ok := v.Interface().(protoreflect.Message)
	if !ok {
		return v.String()
	}
	fields := m.Descriptor().Fields()
	if _, isPair := m.Interface().(*nri.KeyValue); isPair || fields.Len() == 1 && fields.Get(0).Name() == "value" {
		return m.Get(fields.ByName("value")).String()
	}
	var parts []string
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) {
			continue
		}
		if f.IsMap() {
			parts = append(parts, fmt.Sprintf("%s=(%d entries)", f.Name(), m.Get(f).Map().Len()))
			continue
		}
		parts = append(parts, string(f.Name())+"="+fieldText(f, m.Get(f)))
	}
	return strings.Join(parts, " ")
}

func cut(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "") + "…"
}
