package app

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/stats"
)

// clearTime bounds the end of processes that were killed through their cgroup.
const clearTime = 10 * time.Second

// cgroupPort is what the engine does with cgroups.
type cgroupPort struct{ *stats.Reader }

// Clear implements port.Cgroups.
func (cgroupPort) Clear(ctx context.Context, id, cgroupsPath string) error {
	group, err := cgroup.Find(id, cgroupsPath)
	if errors.Is(err, errdefs.ErrInvalidArgument) {
		return nil // a plugin chose a cgroup that is not the container's own
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, clearTime)
	defer cancel()
	err = group.Kill(ctx)
	if err != nil {
		return err
	}
	return group.Remove()
}

// SetOOMScore implements port.Cgroups.
func (cgroupPort) SetOOMScore(_ context.Context, id, cgroupsPath string, from, to int) error {
	group, err := cgroup.Find(id, cgroupsPath)
	if err != nil {
		return err
	}
	return group.SetOOMScore(from, to)
}
