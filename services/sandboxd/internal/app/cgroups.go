package app

import (
	"context"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/stats"
)

// cgroupPort is what the engine does with cgroups.
type cgroupPort struct{ *stats.Reader }

// SetOOMScore implements port.Cgroups.
func (cgroupPort) SetOOMScore(_ context.Context, id, cgroupsPath string, from, to int) error {
	group, err := cgroup.Find(id, cgroupsPath)
	if err != nil {
		return err
	}
	return group.SetOOMScore(from, to)
}
