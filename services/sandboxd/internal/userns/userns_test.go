package userns

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/user"
)

func TestRanges(t *testing.T) {
	t.Parallel()
	// As newuidmap writes them: root is the user, then the subordinate ids; and out of order.
	got := ranges([]user.IDMap{{ID: 70000, ParentID: 5, Count: 10}, {ID: 1, ParentID: 100000, Count: 65535}, {ID: 0, ParentID: 1001, Count: 1}})
	if diff := cmp.Diff(Ranges{{0, 65536}, {70000, 10}}, got); diff != "" {
		t.Fatal(diff)
	}
	if all := ranges([]user.IDMap{{Count: 4294967295}}); !all.Has(4294967294, 1) || all.Has(4294967295, 1) {
		t.Errorf("all ids are %s", all)
	}
	for _, tt := range []struct {
		first, count uint32
		want         bool
	}{{0, 1, true}, {0, 65536, true}, {0, 65537, false}, {65535, 1, true}, {65536, 1, false}, {70000, 10, true}, {69999, 2, false}, {70009, 2, false}} {
		if have := got.Has(tt.first, tt.count); have != tt.want {
			t.Errorf("%s has %d of %d: %t", got, tt.count, tt.first, have)
		}
	}
	if last, known := got.Last(); !known || last != 70009 {
		t.Errorf("last %d, %t", last, known)
	}
}

func TestMachinesNamespaceHasAll(t *testing.T) {
	t.Parallel()
	var n Namespace
	if n.Nested() || n.CheckUIDs(4294967294, 1) != nil || n.CheckGIDs(0, 65536) != nil {
		t.Error("the machine's namespace lacks ids")
	}
	if _, known := n.UIDs.Last(); known || n.UIDs.String() != "all" {
		t.Errorf("ids %s", n.UIDs)
	}
}

func TestCheckNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	n := Namespace{UIDs: Ranges{{0, 65536}}, GIDs: Ranges{{0, 1000}, {2000, 1}}}
	if !n.Nested() {
		t.Error("not nested")
	}
	for _, tt := range []struct {
		err  error
		want []string
	}{
		{n.CheckUIDs(65536, 65536), []string{"users 65536-131071 are not", "has 0-65535;", "/etc/subuid"}},
		{n.CheckGIDs(1500, 1), []string{"groups 1500 are not", "has 0-999, 2000;", "/etc/subgid"}},
	} {
		if !errdefs.IsFailedPrecondition(tt.err) {
			t.Errorf("error %v", tt.err)
			continue
		}
		for _, part := range tt.want {
			if !strings.Contains(tt.err.Error(), part) {
				t.Errorf("%v lacks %q", tt.err, part)
			}
		}
	}
	if (Namespace{UIDs: Ranges{}}).CheckUIDs(0, 1) == nil {
		t.Error("a namespace without ids has root")
	}
}
