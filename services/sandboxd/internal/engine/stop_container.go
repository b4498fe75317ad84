package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// StopContainer sends the stop signal once, waits up to timeout and then kills everything
// in the container. With several callers the shortest timeout wins. It returns NRI's view
// of the stopped container, or nil for an unknown one.
func (e *Engine) StopContainer(ctx context.Context, id string, timeout time.Duration) (*ContainerView, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	c, err := e.container(id)
	if errdefs.IsNotFound(err) || c.rec.Load().GetState() == containerPreparing {
		return nil, nil //nolint:nilnil // an unknown container is a regular answer
	}
	err = e.stop(ctx, c, timeout)
	if err != nil {
		return nil, fmt.Errorf("stop container %q: %w", id, err)
	}
	v := e.view(c)
	return &v, nil
}

// stop ends a running container. It does not hold the container's turn while it waits, so
// that a second call with less patience gets through.
func (e *Engine) stop(ctx context.Context, c *container, timeout time.Duration) error {
	done, err := c.turn.take(ctx) // a start under way comes to its end first
	if err != nil {
		return err
	}
	state := c.rec.Load().GetState()
	done()
	if state != containerRunning && state != containerUnknown {
		return nil
	}
	if timeout > 0 {
		ended, err := e.terminate(ctx, c, timeout)
		if err != nil || ended {
			return err
		}
	}
	return e.kill(ctx, c)
}

// terminate sends the stop signal, unless another call did, and waits.
func (e *Engine) terminate(ctx context.Context, c *container, timeout time.Duration) (ended bool, err error) {
	if c.signalled.CompareAndSwap(false, true) {
		err := e.p.Tasks.Kill(ctx, c.sandbox.id, c.id, "", signalNumber(c.rec.Load().GetStopSignal()), false)
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) {
			c.signalled.Store(false)
			return false, fmt.Errorf("send %s: %w", c.rec.Load().GetStopSignal(), err)
		}
	}
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case <-c.exited:
		return true, nil
	case <-t.C:
		return false, nil
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
}

// kill kills all processes of a container and waits for its end.
func (e *Engine) kill(ctx context.Context, c *container) error {
	c.killed.Store(true)
	err := e.p.Tasks.Kill(ctx, c.sandbox.id, c.id, "", syscall.SIGKILL, true)
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) {
		select {
		case <-c.exited:
			return nil
		default:
			return fmt.Errorf("send SIGKILL: %w", err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, killTime,
		fmt.Errorf("a process survives SIGKILL, it may be in uninterruptible sleep: %w", errdefs.ErrUnavailable))
	defer cancel()
	select {
	case <-c.exited:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// RemoveContainer kills the container if it runs and removes all of it. It returns NRI's
// last view of it, or nil for an unknown one. A failed removal can be repeated, also after
// a restart.
func (e *Engine) RemoveContainer(ctx context.Context, id string) (*ContainerView, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	c, err := e.container(id)
	if errdefs.IsNotFound(err) || c.rec.Load().GetState() == containerPreparing {
		return nil, nil //nolint:nilnil // an unknown container is a regular answer
	}
	done, err := e.stopForGood(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("remove container %q: %w", id, err)
	}
	defer done()
	if _, err := e.container(id); err != nil {
		return nil, nil //nolint:nilnil // removed by a call that had its turn before
	}
	v := e.view(c)
	err = e.discard(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("remove container %q: %w", id, err)
	}
	return &v, nil
}

// stopForGood kills a container and takes its turn, in which nothing can start it any more.
func (e *Engine) stopForGood(ctx context.Context, c *container) (done func(), err error) {
	for {
		err := e.stop(ctx, c, 0)
		if err != nil {
			return nil, err
		}
		done, err := c.turn.take(ctx)
		if err != nil {
			return nil, err
		}
		if c.rec.Load().GetState() != containerRunning {
			return done, nil
		}
		done() // started between the stop and this turn, which happens only once
	}
}

// discard removes everything of an ended container, its record last.
func (e *Engine) discard(ctx context.Context, c *container) error {
	rec := c.rec.Load()
	var deleted *recordv1.Event
	switch {
	case rec.GetTaskDeleted():
	case rec.GetPid() != 0:
		_, err := e.p.Tasks.Delete(ctx, c.sandbox.id, c.id, "")
		if err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("delete task: %w", err)
		}
	case rec.GetState() == containerExited: // of a failed start
		err := e.endTask(ctx, c)
		if err != nil {
			return fmt.Errorf("delete task: %w", err)
		}
	}
	// The shim has done this already, unless its bundle was lost.
	err := e.p.Cgroups.Clear(ctx, c.id, rec.GetCgroupsPath())
	if err != nil {
		return fmt.Errorf("clear cgroup: %w", err)
	}
	err = errors.Join(e.p.IO.Close(ctx, c.id), e.removeStorage(ctx, rec))
	if err != nil {
		return err
	}
	// The follower of the end may have recorded the deletion by now.
	writeDone, err := c.writing.take(ctx)
	if err != nil {
		return err
	}
	defer writeDone()
	rec = c.rec.Load()
	if !rec.GetTaskDeleted() && rec.GetPid() != 0 {
		deleted, err = deleteEvent(ctx, rec)
		if err != nil {
			return err
		}
	}
	gone, err := event(ctx, TopicContainerDelete, "container-delete-"+c.id, true, &events.ContainerDelete{ID: c.id})
	if err != nil {
		return err
	}
	err = e.p.Store.Update(ctx, func(tx *store.Tx) error {
		if deleted != nil {
			err := tx.AppendEvent(deleted)
			if err != nil {
				return err
			}
		}
		err := tx.DeleteContainer(c.id)
		if err != nil {
			return err
		}
		return tx.AppendEvent(gone)
	})
	if err != nil {
		return err
	}
	e.forgetContainer(c, containerKey(rec.GetSandboxId(), rec.GetConfig().GetMetadata()))
	return nil
}

// removeStorage removes root file system and folders of a container.
func (e *Engine) removeStorage(ctx context.Context, rec *recordv1.Container) error {
	err := e.p.Rootfs.Remove(ctx, rec.GetId(), rec.GetSnapshotter())
	if err != nil {
		return fmt.Errorf("remove root file system: %w", err)
	}
	err = e.p.ImageVolumes.Release(ctx, rec.GetSandboxId(), rec.GetId())
	if err != nil {
		return fmt.Errorf("release image volumes: %w", err)
	}
	err = os.RemoveAll(filepath.Join(e.cfg.ContainerDir, rec.GetId()))
	if err != nil {
		return fmt.Errorf("remove folder: %w", err)
	}
	return nil
}

func (e *Engine) volumeDir(id string) string {
	return filepath.Join(e.cfg.ContainerDir, id, "volumes") + string(filepath.Separator)
}
