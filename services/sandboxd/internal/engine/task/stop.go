package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/signal"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
)

// killTime bounds the wait for a killed container's end.
const killTime = 2 * time.Minute

// signalAgain is the pause before a signal is sent again that did not reach the shim.
const signalAgain = 100 * time.Millisecond

// Pauses between looks at whether a process that is to be stopped has a handler.
const (
	handlerFirst = 5 * time.Millisecond
	handlerMost  = 100 * time.Millisecond
)

// Stop ends a running container: it sends the stop signal once, waits up to timeout and then
// kills everything in the container. With several callers the shortest timeout wins. It does not hold the container's turn while it waits, so
// that a second call with less patience gets through.
func (d *Driver) Stop(ctx context.Context, c *table.Container, timeout time.Duration) error {
	done, err := c.Turn.Take(ctx) // a start under way comes to its end first
	if err != nil {
		return err
	}
	state := c.Record().GetState()
	err = d.dropWaiting(ctx, c)
	done()
	if err != nil {
		return err
	}
	if state != table.ContainerRunning && state != table.ContainerUnknown {
		return nil
	}
	if timeout > 0 {
		ended, err := d.terminate(ctx, c, timeout)
		if err != nil || ended {
			return err
		}
	}
	return d.kill(ctx, c)
}

// dropWaiting deletes a task that was created and not started; the container can be started
// again. The caller has the turn.
func (d *Driver) dropWaiting(ctx context.Context, c *table.Container) error {
	if c.Waiting.Load() == nil {
		return nil
	}
	err := d.endTask(ctx, c)
	if err != nil {
		return fmt.Errorf("delete task: %w", err)
	}
	c.Waiting.Store(nil)
	return d.p.IO.Close(ctx, c.ID)
}

// terminate sends the stop signal, unless another call did, and waits.
func (d *Driver) terminate(ctx context.Context, c *table.Container, timeout time.Duration) (ended bool, err error) {
	begun := time.Now()
	if c.Signalled.CompareAndSwap(false, true) {
		sig := signalNumber(c.Record().GetStopSignal())
		d.awaitHandler(ctx, c, sig, timeout)
		if err := d.signal(ctx, c, sig, timeout-time.Since(begun)); err != nil {
			c.Signalled.Store(false)
			return false, fmt.Errorf("send %s: %w", c.Record().GetStopSignal(), err)
		}
	}
	t := time.NewTimer(timeout - time.Since(begun))
	defer t.Stop()
	select {
	case <-c.Exited():
		return true, nil
	case <-t.C:
		return false, nil
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
}

// signal sends a signal to a container's first process. A shim that does not answer is asked
// again while there is time, and it is no error that it never does: SIGKILL needs no shim.
func (d *Driver) signal(ctx context.Context, c *table.Container, sig syscall.Signal, timeout time.Duration) error {
	asked, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		err := d.p.Tasks.Kill(asked, c.Sandbox.ID, c.ID, "", sig, false)
		switch {
		case err == nil, errdefs.IsNotFound(err), errdefs.IsFailedPrecondition(err):
			return nil
		case ctx.Err() != nil, asked.Err() == nil && !errdefs.IsUnavailable(err):
			return err
		}
		select {
		case <-c.Exited():
			return nil
		case <-asked.Done():
			if ctx.Err() != nil {
				return err
			}
			d.p.Log.WarnContext(ctx, "stop signal not sent", slog.String("container_id", c.ID), slog.Any("error", err))
			return nil
		case <-time.After(signalAgain):
		}
	}
}

// awaitHandler waits until the stop signal means something to the container's first process,
// but no longer than its stop may take.
func (d *Driver) awaitHandler(ctx context.Context, c *table.Container, sig syscall.Signal, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	pid := c.Record().GetPid()
	for delay := handlerFirst; !d.p.Programs.Heeds(pid, sig); delay = min(2*delay, handlerMost) {
		select {
		case <-c.Exited():
			return
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
	}
}

// kill kills all processes of a container and waits for its end.
func (d *Driver) kill(ctx context.Context, c *table.Container) error {
	c.Killed.Store(true)
	err := d.p.Tasks.Kill(ctx, c.Sandbox.ID, c.ID, "", syscall.SIGKILL, true)
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) {
		select {
		case <-c.Exited():
			return nil
		default:
			return fmt.Errorf("send SIGKILL: %w", err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, killTime,
		fmt.Errorf("a process survives SIGKILL, it may be in uninterruptible sleep: %w", errdefs.ErrUnavailable))
	defer cancel()
	select {
	case <-c.Exited():
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// StopForGood kills a container and takes its turn, in which nothing can start it any more.
func (d *Driver) StopForGood(ctx context.Context, c *table.Container) (done func(), err error) {
	for {
		err := d.Stop(ctx, c, 0)
		if err != nil {
			return nil, err
		}
		done, err := c.Turn.Take(ctx)
		if err != nil {
			return nil, err
		}
		if c.Record().GetState() != table.ContainerRunning {
			return done, nil
		}
		done() // started between the stop and this turn, which happens only once
	}
}

// signalNumber parses a signal's name or number; an unknown one is SIGTERM.
func signalNumber(name string) syscall.Signal {
	sig, err := signal.ParseSignal(name)
	if err != nil {
		return syscall.SIGTERM
	}
	return sig
}

// Discard removes what an ended container still has of a task: the task itself unless it
// was deleted before, its cgroup, the OCI runtime's state and its streams. The caller has the turn. It may be
// repeated.
func (d *Driver) Discard(ctx context.Context, c *table.Container) error {
	err := d.dropWaiting(ctx, c)
	if err != nil {
		return err
	}
	rec := c.Record()
	switch {
	case rec.GetTaskDeleted():
	case rec.GetPid() != 0:
		err := d.deleteEnded(ctx, c)
		if err != nil {
			return fmt.Errorf("delete task: %w", err)
		}
	case rec.GetState() == table.ContainerExited: // of a failed start
		err := d.endTask(ctx, c)
		if err != nil {
			return fmt.Errorf("delete task: %w", err)
		}
	}
	// The shim has done this already, unless it died, its bundle was lost, or the runtime lied.
	err = d.p.Tasks.Clear(ctx, c.Sandbox.Handler, c.ID, rec.GetCgroupsPath())
	if err != nil {
		return err
	}
	return d.p.IO.Close(ctx, c.ID)
}

// deleteEnded deletes the task of an ended container. A shim that cannot do it may have an OCI
// runtime that does not understand any more what it keeps of the container, as a full disk or a
// power loss leaves it: once that is cleared away there is nothing left to fail at.
func (d *Driver) deleteEnded(ctx context.Context, c *table.Container) error {
	_, err := d.p.Tasks.Delete(ctx, c.Sandbox.ID, c.ID, "")
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsUnavailable(err) && !errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		clearErr := d.p.Tasks.Clear(ctx, c.Sandbox.Handler, c.ID, c.Record().GetCgroupsPath())
		if clearErr != nil {
			return errors.Join(err, clearErr)
		}
		_, err = d.p.Tasks.Delete(ctx, c.Sandbox.ID, c.ID, "")
	}
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}
