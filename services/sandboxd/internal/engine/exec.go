package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// execDrainTime is how long an ended exec's output may still flow to a client that
	// reads it. A child that keeps the output open does not hold the exec longer.
	execDrainTime = 10 * time.Second
	// execKillTime bounds the wait for a killed exec.
	execKillTime = 10 * time.Second
	// execEndTime is how long a failed exec waits for the end of its container, which may
	// be why it failed.
	execEndTime = 100 * time.Millisecond
)

// ErrExecTimeout says that a command was killed because its time was up.
var ErrExecTimeout = fmt.Errorf("command timed out: %w", context.DeadlineExceeded)

// ExecRequest is a command to run in a container.
type ExecRequest struct {
	Cmd     []string
	TTY     bool
	Streams pod.Streams
	// Resize carries new terminal sizes; nil for none.
	Resize <-chan pod.TerminalSize
	// Timeout kills the command with ErrExecTimeout; 0 means no limit.
	Timeout time.Duration
	// Started is called once the command runs; nil for none.
	Started func()
}

// Exec runs a command in a running container and returns its exit code when all of its
// output was delivered. When ctx ends the command is killed.
func (e *Engine) Exec(ctx context.Context, id string, req ExecRequest) (int32, error) {
	c, err := e.running(id)
	if err != nil {
		return 0, err
	}
	spec, err := c.specOf()
	if err != nil {
		return 0, err
	}
	execID := newID()
	io, err := e.p.IO.OpenExec(ctx, c.id, execID, req.TTY, req.Streams)
	if err != nil {
		return 0, fmt.Errorf("exec in container %q: %w", id, err)
	}
	defer func() {
		err := io.Close()
		if err != nil {
			e.log.WarnContext(ctx, "streams of an exec remain", slog.String("container_id", id), slog.Any("error", err))
		}
	}()
	err = e.p.Tasks.Exec(ctx, c.sandbox.id, c.id, ExecSpec{ID: execID, Process: e.p.Specs.Exec(spec, req.Cmd, req.TTY), Stdio: io.Stdio()})
	if err != nil {
		return 0, fmt.Errorf("exec in container %q: %w", id, e.unlessEnded(ctx, c, err))
	}
	defer undo(ctx, func(ctx context.Context) { e.deleteExec(ctx, c, execID) })
	return e.attend(ctx, c, execID, io, req)
}

// running finds a container that processes can be started in.
func (e *Engine) running(id string) (*container, error) {
	err := e.ready()
	if err != nil {
		return nil, err
	}
	c, err := e.container(id)
	if err != nil {
		return nil, err
	}
	if s := c.rec.Load().GetState(); s != containerRunning {
		return nil, fmt.Errorf("container %q is %s, not running: %w", id, stateName(s), errdefs.ErrFailedPrecondition)
	}
	return c, nil
}

// unlessEnded is err, or, if the container's end is what made the exec fail, an error that
// says so.
func (e *Engine) unlessEnded(ctx context.Context, c *container, err error) error {
	// The OCI runtime sees an end before the shim and this process do.
	t := time.NewTimer(execEndTime)
	defer t.Stop()
	select {
	case <-c.exited:
	case <-ctx.Done():
		return err
	case <-t.C:
		st, stateErr := e.p.Tasks.State(ctx, c.sandbox.id, c.id, "")
		gone := errdefs.IsNotFound(stateErr) || (stateErr == nil && st.Status == "stopped")
		if !gone && !c.killed.Load() {
			return err
		}
	}
	return fmt.Errorf("the container has ended: %w: %v", errdefs.ErrFailedPrecondition, err) //nolint:errorlint // the class of the cause must not show
}

type waited struct {
	exit pod.Exit
	err  error
}

// attend starts a made exec and looks after it until its end.
func (e *Engine) attend(ctx context.Context, c *container, execID string, io ExecIO, req ExecRequest) (int32, error) {
	waitCtx, stopWaiting := context.WithCancel(context.WithoutCancel(ctx))
	end := make(chan waited, 1)
	e.background(func(context.Context) {
		exit, err := e.p.Tasks.Wait(waitCtx, c.sandbox.id, c.id, execID)
		end <- waited{exit, err}
	})
	defer stopWaiting()
	_, err := e.p.Tasks.Start(ctx, c.sandbox.id, c.id, execID)
	if err != nil {
		return 0, fmt.Errorf("exec %q in container %q: %w", req.Cmd, c.id, e.unlessEnded(ctx, c, err))
	}
	if req.Started != nil {
		req.Started()
	}
	var timeout <-chan time.Time
	if req.Timeout > 0 {
		t := time.NewTimer(req.Timeout)
		defer t.Stop()
		timeout = t.C
	}
	resize, stdinDone := req.Resize, io.StdinDone()
	for {
		select {
		case w := <-end:
			return e.finish(ctx, io, w)
		case size, ok := <-resize:
			if !ok {
				resize = nil
				continue
			}
			err := e.p.Tasks.ResizePty(ctx, c.sandbox.id, c.id, execID, size)
			if err != nil {
				e.log.DebugContext(ctx, "terminal not resized", slog.String("container_id", c.id), slog.Any("error", err))
			}
		case <-stdinDone:
			stdinDone = nil
			err := e.p.Tasks.CloseIO(ctx, c.sandbox.id, c.id, execID)
			if err != nil {
				e.log.DebugContext(ctx, "stdin not closed", slog.String("container_id", c.id), slog.Any("error", err))
			}
		case <-timeout:
			return 0, errors.Join(fmt.Errorf("exec in container %q: after %v: %w", c.id, req.Timeout, ErrExecTimeout), e.killExec(ctx, c, execID, end))
		case <-ctx.Done():
			return 0, errors.Join(context.Cause(ctx), e.killExec(ctx, c, execID, end))
		}
	}
}

func (e *Engine) finish(ctx context.Context, io ExecIO, w waited) (int32, error) {
	if w.err != nil {
		return 0, fmt.Errorf("exec: %w", w.err)
	}
	ctx, cancel := context.WithTimeout(ctx, execDrainTime)
	defer cancel()
	err := io.Drain(ctx)
	if err != nil {
		e.log.DebugContext(ctx, "output of an exec is still open after its end", slog.Any("error", err))
	}
	return int32(w.exit.Code), nil
}

// killExec kills a started exec and waits for its end.
func (e *Engine) killExec(ctx context.Context, c *container, execID string, end <-chan waited) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), execKillTime)
	defer cancel()
	err := e.p.Tasks.Kill(ctx, c.sandbox.id, c.id, execID, syscall.SIGKILL, false)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("kill exec: %w", err)
	}
	select {
	case <-end:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("exec survives SIGKILL: %w", errdefs.ErrUnavailable)
	}
}

func (e *Engine) deleteExec(ctx context.Context, c *container, execID string) {
	_, err := e.p.Tasks.Delete(ctx, c.sandbox.id, c.id, execID)
	if err != nil && !errdefs.IsNotFound(err) {
		e.log.WarnContext(ctx, "exec remains until its container ends", slog.String("container_id", c.id), slog.Any("error", err))
	}
}

// AttachRequest connects a client to a container's first process.
type AttachRequest struct {
	Streams pod.Streams
	Resize  <-chan pod.TerminalSize
	// Started is called once the client is connected; nil for none.
	Started func()
}

// Attach connects a client until the container ends or the client goes.
func (e *Engine) Attach(ctx context.Context, id string, req AttachRequest) error {
	c, err := e.running(id)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if req.Started != nil {
		req.Started()
	}
	e.background(func(context.Context) {
		for {
			select {
			case <-ctx.Done():
				return
			case size, ok := <-req.Resize:
				if !ok {
					return
				}
				err := e.p.Tasks.ResizePty(ctx, c.sandbox.id, c.id, "", size)
				if err != nil {
					e.log.DebugContext(ctx, "terminal not resized", slog.String("container_id", c.id), slog.Any("error", err))
				}
			}
		}
	})
	return e.p.IO.Attach(ctx, c.id, req.Streams)
}

// ReopenLog opens a running container's log anew.
func (e *Engine) ReopenLog(ctx context.Context, id string) error {
	c, err := e.running(id)
	if err != nil {
		return err
	}
	return e.p.IO.ReopenLog(ctx, c.id)
}

// CloseStdin tells a container's shim that its input has ended.
func (e *Engine) CloseStdin(ctx context.Context, id string) {
	c, err := e.container(id)
	if err != nil {
		return
	}
	err = e.p.Tasks.CloseIO(ctx, c.sandbox.id, id, "")
	if err != nil {
		e.log.DebugContext(ctx, "stdin not closed", slog.String("container_id", id), slog.Any("error", err))
	}
}
