package adjust

import (
	"maps"
	"slices"

	nri "github.com/containerd/nri/pkg/api"
)

// merge is the application of one plugin's answer to one container.
type merge struct {
	plugin string
	owners *nri.FieldOwners
}

// own makes the plugin the owner of a field that is set as a whole. That a plugin sets
// its own field a second time is no conflict.
func (m *merge) own(f nri.Field) error {
	if owner, ok := m.owners.Simple[f.Key()]; ok && owner == m.plugin {
		return nil
	}
	if err := m.owners.IsSimpleConflict(f.Key(), m.plugin); err != nil {
		return conflict(err)
	}
	m.owners.Simple[f.Key()] = m.plugin
	return nil
}

// ownEntry makes the plugin the owner of one entry of a field.
func (m *merge) ownEntry(f nri.Field, key string) error {
	entries := m.entries(f)
	if owner, ok := entries[key]; ok && owner == m.plugin {
		return nil
	}
	if err := m.owners.IsCompoundConflict(f.Key(), key, m.plugin); err != nil {
		return conflict(err)
	}
	entries[key] = m.plugin
	return nil
}

func (m *merge) entries(f nri.Field) map[string]string {
	c, ok := m.owners.Compound[f.Key()]
	if !ok {
		c = nri.NewCompoundFieldOwners()
		m.owners.Compound[f.Key()] = c
	}
	return c.Owners
}

// set sets a field to v in all targets; nil leaves it alone.
func set[T any](m *merge, f nri.Field, v *T, targets ...**T) error {
	if v == nil {
		return nil
	}
	if err := m.own(f); err != nil {
		return err
	}
	for _, t := range targets {
		*t = v
	}
	return nil
}

// setString sets a field whose empty value means "not set".
func setString(m *merge, f nri.Field, v string, targets ...*string) error {
	if v == "" {
		return nil
	}
	if err := m.own(f); err != nil {
		return err
	}
	for _, t := range targets {
		*t = v
	}
	return nil
}

// entry is one element of a list whose elements have keys.
type entry[T any] struct {
	key     string
	removal bool
	item    T
}

// split sorts a plugin's list into one entry per key: the last value, or the removal if
// there is no value. removed holds all keys that are marked for removal.
func split[T any](items []T, key func(T) string) (entries []entry[T], removed map[string]bool) {
	removed = make(map[string]bool)
	index := make(map[string]int)
	for _, item := range items {
		k, removal := nri.IsMarkedForRemoval(key(item))
		if removal {
			removed[k] = true
		}
		i, seen := index[k]
		switch {
		case !seen:
			index[k] = len(entries)
			entries = append(entries, entry[T]{k, removal, item})
		case !removal:
			entries[i] = entry[T]{k, false, item}
		}
	}
	return entries, removed
}

// list merges a plugin's list into a collected list and into the view of the container.
// The view of later plugins never holds removals.
func list[T any](m *merge, f nri.Field, items []T, key func(T) string, collected, view *[]T) error {
	if len(items) == 0 {
		return nil
	}
	entries, removed := split(items, key)
	m.release(f, removed, func(k string) bool {
		return slices.ContainsFunc(*collected, func(c T) bool { return key(c) == k })
	})
	touched := make(map[string]bool, len(entries))
	for _, e := range entries {
		touched[e.key] = true
		if e.removal {
			continue
		}
		if err := m.ownEntry(f, e.key); err != nil {
			return err
		}
	}
	hit := func(item T) bool { return touched[nri.ClearRemovalMarker(key(item))] }
	*collected = slices.DeleteFunc(*collected, hit)
	*view = slices.DeleteFunc(*view, hit)
	for _, e := range entries {
		*collected = append(*collected, e.item)
		if !e.removal {
			*view = append(*view, e.item)
		}
	}
	return nil
}

// dict merges a plugin's map like list does.
func dict[V any](m *merge, f nri.Field, items map[string]V, collected, view *map[string]V) error {
	if len(items) == 0 {
		return nil
	}
	// Sorted, so that of several conflicts always the same one is reported.
	keys := slices.Sorted(maps.Keys(items))
	entries, removed := split(keys, func(k string) string { return k })
	m.release(f, removed, func(k string) bool { _, ok := (*collected)[k]; return ok })
	ensure(collected)
	ensure(view)
	for _, e := range entries {
		if !e.removal {
			if err := m.ownEntry(f, e.key); err != nil {
				return err
			}
		}
		delete(*collected, e.key)
		delete(*collected, nri.MarkForRemoval(e.key))
		delete(*view, e.key)
		(*collected)[e.item] = items[e.item]
		if !e.removal {
			(*view)[e.key] = items[e.item]
		}
	}
	return nil
}

// release ends the ownership of the removed entries that an earlier plugin has set.
func (m *merge) release(f nri.Field, removed map[string]bool, collected func(string) bool) {
	for k := range removed {
		if collected(k) {
			m.entries(f)[k] = nri.MarkForRemoval(m.plugin)
		}
	}
}

func ensure[K comparable, V any](m *map[K]V) {
	if *m == nil {
		*m = make(map[K]V)
	}
}
