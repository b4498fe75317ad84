package namespace

import (
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A root file system can be shifted by one range that has the root user, and by no other.
func TestUserMappings(t *testing.T) {
	t.Parallel()
	mapping := func(container, host, length uint32) *criv1.IDMapping {
		return &criv1.IDMapping{ContainerId: container, HostId: host, Length: length}
	}
	good := []*criv1.IDMapping{mapping(0, 1000, 65536)}
	for name, c := range map[string]struct {
		ids []*criv1.IDMapping
		ok  bool
	}{
		"one range":    {good, true},
		"to the end":   {[]*criv1.IDMapping{mapping(0, 1<<32-1-10, 10)}, true},
		"two ranges":   {[]*criv1.IDMapping{mapping(0, 1000, 10), mapping(10, 5000, 10)}, false},
		"without root": {[]*criv1.IDMapping{mapping(1, 1000, 10)}, false},
		"empty":        {[]*criv1.IDMapping{mapping(0, 1000, 0)}, false},
		"too high":     {[]*criv1.IDMapping{mapping(0, 1<<32-10, 10)}, false},
	} {
		for _, user := range []*criv1.UserNamespace{{Uids: c.ids, Gids: good}, {Uids: good, Gids: c.ids}} {
			uids, gids, err := mappings(user)
			if c.ok && (err != nil || len(uids) != 1 || len(gids) != 1) || !c.ok && !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s: %v %v %v", name, uids, gids, err)
			}
		}
	}
}
