package task

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
)

const (
	// criuWork is the folder of CRIU's logs in a bundle.
	criuWork = "criu-work"
	// dumpLog and restoreLog are the logs that CRIU writes.
	dumpLog    = "dump.log"
	restoreLog = "restore.log"
	// maxCRIULog is how much of the end of CRIU's log is looked through for errors.
	maxCRIULog = 64 << 10
	// criuErrors is how many of CRIU's last errors go into an error.
	criuErrors = 3
)

// Checkpoint writes the state of the container's processes into a folder. It fails with
// ErrFailedPrecondition if the container does not run.
func (c *Container) Checkpoint(ctx context.Context, path string, o *options.CheckpointOptions) error {
	fail := func(err error) error { return fmt.Errorf("checkpoint of container %q: %w", c.spec.ID, err) }
	if path == "" {
		path = o.GetImagePath()
	}
	if !filepath.IsAbs(path) {
		return fail(fmt.Errorf("folder %q is not absolute: %w", path, errdefs.ErrInvalidArgument))
	}
	if state, _ := c.init.State(); state != Running && state != Paused {
		return fail(fmt.Errorf("%w: %w", errOver, errdefs.ErrFailedPrecondition))
	}
	work, drop := c.workDir(o.GetWorkPath())
	defer drop()
	var actions []runc.CheckpointAction
	if !o.GetExit() {
		actions = append(actions, runc.LeaveRunning)
	}
	since := sizeOf(c.runc.Log)
	err := c.runc.Checkpoint(ctx, c.spec.ID, &runc.CheckpointOpts{
		WorkDir: work, ImagePath: path, AllowOpenTCP: o.GetOpenTcp(), AllowExternalUnixSockets: o.GetExternalUnixSockets(),
		AllowTerminal: o.GetTerminal(), FileLocks: o.GetFileLocks(), EmptyNamespaces: o.GetEmptyNamespaces(),
		Cgroups: runc.CgroupMode(o.GetCgroupsMode()), ParentPath: o.GetParentPath(),
	}, actions...)
	if err != nil {
		return fail(criuError(runtimeError(err, "checkpoint", c.runc.Log, since), filepath.Join(work, dumpLog)))
	}
	c.host.Publish("/tasks/checkpointed", &events.TaskCheckpointed{ContainerID: c.spec.ID, Checkpoint: path})
	return nil
}

// workDir is the folder for CRIU's logs: the wanted one, or one that drop removes.
func (c *Container) workDir(wanted string) (dir string, drop func()) {
	if wanted != "" {
		return wanted, func() {}
	}
	dir = filepath.Join(c.spec.Bundle, criuWork)
	return dir, func() {
		if err := os.RemoveAll(dir); err != nil {
			c.host.Log.Warn("CRIU's logs", slog.String("container_id", c.spec.ID), slog.String("error", err.Error()))
		}
	}
}

// criuError adds the last errors in CRIU's log to an error.
func criuError(err error, path string) error {
	said := criuSaid(path)
	if said == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, said)
}

// criuSaid reads the last errors of CRIU's log.
func criuSaid(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	tail := make([]byte, min(st.Size(), maxCRIULog))
	n, err := f.ReadAt(tail, st.Size()-int64(len(tail)))
	if n == 0 && err != nil {
		return ""
	}
	var found []string
	for line := range strings.Lines(string(tail[:n])) {
		// A line is "(seconds) Error (file:line): text".
		if _, text, ok := strings.Cut(line, "Error ("); ok {
			found = append(found, "criu: "+strings.ToValidUTF8(strings.TrimSpace("("+text), "?"))
		}
	}
	return strings.Join(found[max(0, len(found)-criuErrors):], "; ")
}

// checkCheckpoint says why a checkpoint cannot be restored from.
func (c *Container) checkCheckpoint() error {
	path := c.spec.Checkpoint
	if !filepath.IsAbs(path) {
		return fmt.Errorf("folder %q of the checkpoint is not absolute: %w", path, errdefs.ErrInvalidArgument)
	}
	st, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("checkpoint: %w: %w", err, errdefs.ErrNotFound)
	case err != nil:
		return fmt.Errorf("checkpoint: %w", err)
	case !st.IsDir():
		return fmt.Errorf("checkpoint %s is not a folder: %w", path, errdefs.ErrInvalidArgument)
	}
	return nil
}

// restore lets the runtime bring the first process back from its checkpoint, running.
func (c *Container) restore(ctx context.Context) error {
	hold := c.host.Reaper.Hold()
	defer hold.Release()
	o := c.spec.Options
	work, drop := c.workDir(o.GetCriuWorkPath())
	defer drop()
	err := c.init.connect(ctx, func(socket runc.ConsoleSocket, io runc.IO) error {
		opts := &runc.RestoreOpts{
			CheckpointOpts: runc.CheckpointOpts{ImagePath: c.spec.Checkpoint, WorkDir: work, ParentPath: c.spec.ParentCheckpoint},
			PidFile:        filepath.Join(c.spec.Bundle, initPidFile),
			NoPivot:        o.GetNoPivotRoot(), Detach: true, NoSubreaper: true, IO: io,
		}
		if socket != nil {
			opts.ConsoleSocket = socket
		}
		since := sizeOf(c.runc.Log)
		_, err := c.runc.Restore(ctx, c.spec.ID, c.spec.Bundle, opts)
		return criuError(runtimeError(err, "restore", c.runc.Log, since), filepath.Join(work, restoreLog))
	})
	if err == nil {
		err = c.adopt(ctx, hold)
	}
	if err != nil {
		return errors.Join(err, c.abandonRestore(ctx))
	}
	return nil
}

// abandonRestore removes what a failed restore left, except for the root file system.
func (c *Container) abandonRestore(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
	defer cancel()
	if err := c.runc.Delete(ctx, c.spec.ID, &runc.DeleteOpts{Force: true}); err != nil {
		c.host.Log.DebugContext(ctx, "rest of a failed restore", slog.String("container_id", c.spec.ID), slog.String("error", err.Error()))
	}
	c.unwatchOOM()
	return c.init.disconnect()
}

// giveUp ends a container whose first process was to be restored and was not. It says
// whether it was one.
func (c *Container) giveUp(ctx context.Context) (bool, error) {
	p := c.init
	if c.spec.Checkpoint == "" {
		return false, nil
	}
	if err := p.acquire(ctx); err != nil {
		return false, err
	}
	p.mu.Lock()
	idle := p.child == nil && p.state == Created
	if idle {
		p.state = Stopped
	}
	p.mu.Unlock()
	p.release()
	if idle {
		p.ended(reaper.Exit{Status: 128 + int(unix.SIGKILL), At: time.Now()})
	}
	return idle, nil
}
