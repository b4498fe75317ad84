// Package userns knows the user namespace that the daemon itself runs in: whether there is one
// besides the machine's, and which ids it has. Everybody who acts differently in one gets to know
// it from here.
//
// A daemon in a user namespace is root of it and of nothing else: the kernel lets it set up
// namespaces of its own, and no more of the machine than the user may who made the namespace.
// All of it may be called concurrently.
package userns

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"github.com/moby/sys/userns"
)

// Namespace is a user namespace. The zero value is the machine's, which has all ids.
type Namespace struct {
	UIDs, GIDs Ranges
}

// Own returns the namespace of this process.
func Own() (Namespace, error) {
	if !userns.RunningInUserNS() {
		return Namespace{}, nil
	}
	uids, err := user.CurrentProcessUIDMap()
	if err != nil {
		return Namespace{}, fmt.Errorf("users of the user namespace: %w", err)
	}
	gids, err := user.CurrentProcessGIDMap()
	if err != nil {
		return Namespace{}, fmt.Errorf("groups of the user namespace: %w", err)
	}
	n := Namespace{UIDs: ranges(uids), GIDs: ranges(gids)}
	if !n.UIDs.Has(0, 1) || !n.GIDs.Has(0, 1) {
		return Namespace{}, fmt.Errorf("the user namespace has users %s and groups %s, and so no root: %w", n.UIDs, n.GIDs, errdefs.ErrFailedPrecondition)
	}
	return n, nil
}

// Nested says that it is not the machine's.
func (n Namespace) Nested() bool { return n.UIDs != nil }

// CheckUIDs says whether a range of users is in the namespace. Errors: ErrFailedPrecondition.
func (n Namespace) CheckUIDs(first, count uint32) error {
	return n.UIDs.check("users", "/etc/subuid", first, count)
}

// CheckGIDs says whether a range of groups is in the namespace. Errors: ErrFailedPrecondition.
func (n Namespace) CheckGIDs(first, count uint32) error {
	return n.GIDs.check("groups", "/etc/subgid", first, count)
}

// Range is ids from the first one on.
type Range struct {
	First, Count uint32
}

// Ranges are the ids that a namespace has, in order and with gaps between them; nil are all.
type Ranges []Range

// ranges are the ids of mappings as seen from inside.
func ranges(maps []user.IDMap) Ranges {
	out := make(Ranges, 0, len(maps)) // not nil: a namespace without ids has none
	maps = slices.Clone(maps)
	slices.SortFunc(maps, func(a, b user.IDMap) int { return int(a.ID - b.ID) })
	for _, m := range maps {
		first := uint32(min(max(m.ID, 0), math.MaxUint32))
		count := uint32(min(max(m.Count, 0), math.MaxUint32-int64(first)))
		if last := len(out) - 1; last >= 0 && out[last].end() >= uint64(first) {
			out[last].Count = uint32(max(out[last].end(), uint64(first)+uint64(count)) - uint64(out[last].First))
			continue
		}
		out = append(out, Range{First: first, Count: count})
	}
	return out
}

func (r Range) end() uint64 { return uint64(r.First) + uint64(r.Count) }

func (r Range) String() string {
	if r.Count == 1 {
		return strconv.FormatUint(uint64(r.First), 10)
	}
	return fmt.Sprintf("%d-%d", r.First, r.end()-1)
}

// Has says whether all ids of a range are there.
func (r Ranges) Has(first, count uint32) bool {
	if r == nil {
		return true
	}
	want := Range{First: first, Count: count}
	return slices.ContainsFunc(r, func(have Range) bool { return have.First <= first && want.end() <= have.end() })
}

// Last is the highest id; false if all are there.
func (r Ranges) Last() (uint32, bool) {
	if len(r) == 0 {
		return 0, false
	}
	return uint32(r[len(r)-1].end() - 1), true
}

func (r Ranges) String() string {
	if r == nil {
		return "all"
	}
	if len(r) == 0 {
		return "none"
	}
	parts := make([]string, len(r))
	for i, one := range r {
		parts[i] = one.String()
	}
	return strings.Join(parts, ", ")
}

func (r Ranges) check(kind, file string, first, count uint32) error {
	if count == 0 || r.Has(first, count) {
		return nil
	}
	return fmt.Errorf("%s %s are not in the user namespace that sandboxd runs in, which has %s; more come with a longer range in %s for the user who starts it: %w",
		kind, Range{First: first, Count: count}, r, file, errdefs.ErrFailedPrecondition)
}
