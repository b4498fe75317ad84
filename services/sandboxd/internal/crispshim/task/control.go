package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
)

// Kill sends a signal to a process, or to every process of the container. SIGKILL for an exec takes
// its process group along: a command that is killed must not leave behind what it was waiting for.
// It fails with ErrNotFound if the process has ended.
func (c *Container) Kill(ctx context.Context, execID string, sig unix.Signal, all bool) error {
	p, err := c.Process(execID)
	if err != nil {
		return err
	}
	if sig < 0 || sig > 64 {
		return fmt.Errorf("signal %d: %w", sig, errdefs.ErrInvalidArgument)
	}
	if execID == "" && sig == unix.SIGKILL {
		if done, err := c.giveUp(ctx); done || err != nil {
			return err
		}
	}
	if execID != "" && (all || sig == unix.SIGKILL) {
		return p.SignalGroup(sig)
	}
	if all {
		if sig == unix.SIGKILL {
			kctx, cancel := context.WithTimeout(ctx, killTime)
			defer cancel()
			err = c.Processes().Kill(kctx)
		} else {
			err = c.Processes().Signal(sig)
		}
		if err != nil {
			return fmt.Errorf("container %q: %w", c.spec.ID, err)
		}
		if err := p.Signal(sig); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		return nil
	}
	if state, _ := p.State(); state == Paused && sig == unix.SIGKILL {
		// Nothing dies while it is frozen.
		if err := c.Resume(ctx); err != nil {
			return err
		}
	}
	return p.Signal(sig)
}

// Delete removes a container whose first process has ended or was never started. It fails
// with ErrFailedPrecondition if it runs, and can be repeated after an error.
func (c *Container) Delete(ctx context.Context) error {
	state, _ := c.init.State()
	if state == Created {
		// It never ran; the runtime holds it.
		if err := c.Kill(ctx, "", unix.SIGKILL, false); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		if _, err := c.init.Wait(ctx); err != nil {
			return err
		}
	} else if state != Stopped {
		return fmt.Errorf("container %q is running: %w", c.spec.ID, errdefs.ErrFailedPrecondition)
	}
	select {
	case <-c.init.told:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := c.init.acquire(ctx); err != nil {
		return err
	}
	defer c.init.release()
	c.init.mu.Lock()
	deleted, e := c.init.deleted, c.init.exit
	c.init.mu.Unlock()
	if deleted {
		return fmt.Errorf("container %q: %w", c.spec.ID, errdefs.ErrNotFound)
	}
	if err := c.remove(ctx); err != nil {
		return fmt.Errorf("container %q: %w", c.spec.ID, err)
	}
	c.init.mu.Lock()
	c.init.deleted = true
	c.init.mu.Unlock()
	c.publishDelete(c.init, e)
	return nil
}

// remove removes everything of an ended container.
func (c *Container) remove(ctx context.Context) error {
	kctx, cancel := context.WithTimeout(ctx, killTime)
	defer cancel()
	if err := c.Processes().Kill(kctx); err != nil {
		return err
	}
	if err := c.runtime.Delete(ctx, c.spec.Bundle, c.spec.ID); err != nil {
		return err
	}
	c.unwatchOOM()
	errs := []error{c.init.disconnect()}
	for _, p := range c.Execs() {
		errs = append(errs, p.disconnect())
	}
	return errors.Join(append(errs, c.unmount())...)
}

func (c *Container) publishDelete(p *Process, e reaper.Exit) {
	c.host.Publish("/tasks/delete", &events.TaskDelete{
		ContainerID: c.spec.ID, ID: p.execID, Pid: uint32(e.Pid), ExitStatus: uint32(e.Status), ExitedAt: timestamppb.New(e.At),
	})
}

// Destroy ends and removes the container, whatever state it is in.
func (c *Container) Destroy(ctx context.Context) error {
	if err := c.Kill(ctx, "", unix.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if _, err := c.init.Wait(ctx); err != nil {
		return err
	}
	err := c.Delete(ctx)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Pause freezes the container.
func (c *Container) Pause(ctx context.Context) error {
	since := sizeOf(c.runc.Log)
	if err := c.runc.Pause(ctx, c.spec.ID); err != nil {
		return fmt.Errorf("container %q: %w", c.spec.ID, runtimeError(err, "pause", c.runc.Log, since))
	}
	c.mu.Lock()
	c.paused = true
	c.mu.Unlock()
	c.host.Publish("/tasks/paused", &events.TaskPaused{ContainerID: c.spec.ID})
	return nil
}

// Resume thaws the container.
func (c *Container) Resume(ctx context.Context) error {
	since := sizeOf(c.runc.Log)
	if err := c.runc.Resume(ctx, c.spec.ID); err != nil {
		return fmt.Errorf("container %q: %w", c.spec.ID, runtimeError(err, "resume", c.runc.Log, since))
	}
	c.mu.Lock()
	c.paused = false
	c.mu.Unlock()
	c.host.Publish("/tasks/resumed", &events.TaskResumed{ContainerID: c.spec.ID})
	return nil
}

// Update changes the resources, which are given in JSON.
func (c *Container) Update(ctx context.Context, resources []byte) error {
	var r specs.LinuxResources
	if err := json.Unmarshal(resources, &r); err != nil {
		return fmt.Errorf("resources of container %q: %w: %w", c.spec.ID, err, errdefs.ErrInvalidArgument)
	}
	since := sizeOf(c.runc.Log)
	if err := c.runc.Update(ctx, c.spec.ID, &r); err != nil {
		return fmt.Errorf("container %q: %w", c.spec.ID, runtimeError(err, "update", c.runc.Log, since))
	}
	return nil
}
