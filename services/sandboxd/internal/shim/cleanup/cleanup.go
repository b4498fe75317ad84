// Package cleanup ends and removes what a dead shim left of a container: its processes, its
// mounts and its control group, but not its bundle.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

// parallel is how many delete commands run at the same time.
const parallel = 8

// Cleaner cleans up. It is safe for concurrent use, for one container one at a time.
type Cleaner struct {
	commands *command.Runner
	limit    time.Duration
	bootID   string
	slots    chan struct{} // running delete commands
}

// New returns a cleaner. limit bounds each step; bootID is of the running kernel.
func New(commands *command.Runner, limit time.Duration, bootID string) *Cleaner {
	return &Cleaner{commands: commands, limit: limit, bootID: bootID, slots: make(chan struct{}, parallel)}
}

// Container cleans up after a container of a pod and returns its exit: the one that the shim
// saved, else the one that the shim's delete command reports, else an unknown one. What fails
// is logged.
func (c *Cleaner) Container(ctx context.Context, log *slog.Logger, b bundle.Pod, meta bundle.Meta, id string) pod.Exit {
	log = log.With(slog.String("container_id", id))
	dir := b.ContainerDir(id)
	saved, savedErr := bundle.ReadExit(dir)
	if savedErr != nil && !errdefs.IsNotFound(savedErr) {
		log.WarnContext(ctx, "saved exit not readable", slog.String("error", savedErr.Error()))
	}
	if err := c.killRooted(ctx, dir); err != nil {
		log.ErrorContext(ctx, "processes of dead shim's container", slog.String("error", err.Error()))
	}
	reported, err := c.delete(ctx, meta, id, dir)
	if err != nil {
		log.WarnContext(ctx, "delete command of dead shim", slog.String("error", err.Error()))
	}
	if err := c.kill(ctx, id, dir); err != nil {
		log.ErrorContext(ctx, "processes of dead shim's container", slog.String("error", err.Error()))
	}
	if err := bundle.Unmount(dir); err != nil {
		log.ErrorContext(ctx, "root file system of dead shim's container", slog.String("error", err.Error()))
	}
	if savedErr == nil {
		return saved
	}
	if err != nil {
		reported = pod.Exit{Pid: bundle.ReadPid(dir, ""), Code: pod.ExitCodeUnknown, Unknown: true}
	}
	if reported.At.IsZero() {
		reported.At = time.Now()
	}
	if err := bundle.WriteExit(dir, reported); err != nil {
		log.WarnContext(ctx, "exit not saved", slog.String("error", err.Error()))
	}
	return reported
}

// delete runs the shim's delete command. After a reboot there is nothing that it could find.
func (c *Cleaner) delete(ctx context.Context, meta bundle.Meta, id, dir string) (pod.Exit, error) {
	if meta.BootID != c.bootID {
		return pod.Exit{}, fmt.Errorf("the machine was restarted: %w", errdefs.ErrNotFound)
	}
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return pod.Exit{}, context.Cause(ctx)
	}
	return c.commands.Delete(ctx, command.Shim{Path: meta.ShimPath, ID: id, Dir: dir}, c.limit)
}

// killRooted kills what still runs of a container that was made without a control group. It finds it
// by the root file system, which the delete command takes away.
func (c *Cleaner) killRooted(ctx context.Context, dir string) error {
	path, err := bundle.CgroupsPath(dir)
	if err != nil || path != "" {
		return nil // what is wrong with the bundle is told by the steps that follow
	}
	ctx, cancel := context.WithTimeout(ctx, c.limit)
	defer cancel()
	return procs.Rooted(filepath.Join(dir, "rootfs")).Kill(ctx)
}

// kill kills what still runs in the container's control group and removes the group.
func (c *Cleaner) kill(ctx context.Context, id, dir string) error {
	path, err := bundle.CgroupsPath(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the bundle is gone, as by the delete command; what its record knows of is looked for all the same
	}
	if err != nil {
		return err
	}
	g, err := cgroup.Find(id, path)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.limit)
	defer cancel()
	if err := g.Kill(ctx); err != nil {
		return err
	}
	return g.Remove()
}
