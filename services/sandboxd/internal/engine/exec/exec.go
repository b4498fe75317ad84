package exec

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// drainTime is how long an ended exec's output may still flow to a client that
	// reads it, if its time is not up before. A child that keeps the output open does not
	// hold the exec longer.
	drainTime = 10 * time.Second
	// lastTime is what a command that ends in the last moment of its time still has for that.
	lastTime = time.Second
	// killTime bounds the wait for a killed exec.
	killTime = 10 * time.Second
	// deleteTime is how long who has run an exec waits for its deletion: a shim may put it
	// off while a child holds the output open.
	deleteTime = time.Second
	// endTime is how long a failed exec waits for the end of its container, which may
	// be why it failed.
	endTime = 100 * time.Millisecond
)

// ErrTimeout says that a command was killed because its time was up.
var ErrTimeout = fmt.Errorf("command timed out: %w", context.DeadlineExceeded)

// Request is a command to run in a container.
type Request struct {
	Cmd     []string
	TTY     bool
	Streams pod.Streams
	// Resize carries new terminal sizes; nil for none.
	Resize <-chan pod.TerminalSize
	// Timeout kills the command with ErrTimeout; 0 means no limit.
	Timeout time.Duration
	// Started is called once the command runs; nil for none.
	Started func()
}

// Run runs a command in a running container and returns its exit code when all of its
// output was delivered. When ctx ends the command is killed.
func (r *Runner) Run(ctx context.Context, id string, req Request) (int32, error) {
	c, err := r.p.Table.Running(id)
	if err != nil {
		return 0, err
	}
	spec, err := c.Spec()
	if err != nil {
		return 0, err
	}
	process := r.p.Specs.Exec(spec, req.Cmd, req.TTY, c.Sandbox.Handler)
	if err := r.p.Programs.CheckExec(c.ID, c.Record().GetPid(), &process); err != nil {
		return 0, fmt.Errorf("exec in container %q: cmd: %w", id, err)
	}
	execID := table.NewID()
	io, err := r.p.IO.OpenExec(ctx, c.ID, execID, req.TTY, req.Streams)
	if err != nil {
		return 0, fmt.Errorf("exec in container %q: %w", id, err)
	}
	defer func() {
		err := io.Close()
		if err != nil {
			r.p.Log.WarnContext(ctx, "streams of an exec remain", slog.String("container_id", id), slog.Any("error", err))
		}
	}()
	err = r.p.Tasks.Exec(ctx, c.Sandbox.ID, c.ID, port.ExecSpec{ID: execID, Process: process, Stdio: io.Stdio()})
	if err != nil {
		return 0, fmt.Errorf("exec in container %q: %w", id, r.unlessEnded(ctx, c, err))
	}
	defer work.Undo(ctx, func(ctx context.Context) { r.deleteExec(ctx, c, execID) })
	return r.attend(ctx, c, execID, io, req)
}

// unlessEnded is err, or, if the container's end is what made the exec fail, an error that
// says so.
func (r *Runner) unlessEnded(ctx context.Context, c *table.Container, err error) error {
	// The OCI runtime sees an end before the shim and this process do.
	t := time.NewTimer(endTime)
	defer t.Stop()
	select {
	case <-c.Exited():
	case <-ctx.Done():
		return err
	case <-t.C:
		st, stateErr := r.p.Tasks.State(ctx, c.Sandbox.ID, c.ID, "")
		gone := errdefs.IsNotFound(stateErr) || (stateErr == nil && st.Status == "stopped")
		if !gone && !c.Killed.Load() {
			return err
		}
	}
	return fmt.Errorf("the container has ended: %w: %v", errdefs.ErrFailedPrecondition, err) //nolint:errorlint // the class of the cause must not show
}

// shown is a command as errors name it: a command line may have megabytes.
func shown(cmd []string) string {
	const most = 200
	line := strings.Join(cmd[:min(len(cmd), most)], " ")
	if len(line) > most {
		return line[:most] + "…"
	}
	return line
}

type waited struct {
	exit pod.Exit
	err  error
}

// attend starts a made exec and looks after it until its end.
func (r *Runner) attend(ctx context.Context, c *table.Container, execID string, io port.ExecIO, req Request) (int32, error) {
	waitCtx, stopWaiting := context.WithCancel(context.WithoutCancel(ctx))
	end := make(chan waited, 1)
	r.p.Work.Go(func(context.Context) {
		exit, err := r.p.Tasks.Wait(waitCtx, c.Sandbox.ID, c.ID, execID)
		end <- waited{exit, err}
	})
	defer stopWaiting()
	_, err := r.p.Tasks.Start(ctx, c.Sandbox.ID, c.ID, execID)
	if err != nil {
		return 0, fmt.Errorf("exec %q in container %q: %w", shown(req.Cmd), c.ID, r.unlessEnded(ctx, c, err))
	}
	if req.Started != nil {
		req.Started()
	}
	var timeout <-chan time.Time
	var deadline time.Time
	if req.Timeout > 0 {
		t := time.NewTimer(req.Timeout)
		defer t.Stop()
		timeout, deadline = t.C, time.Now().Add(req.Timeout)
	}
	resize, stdinDone := req.Resize, io.StdinDone()
	for {
		select {
		case w := <-end:
			return r.finish(ctx, io, w, deadline)
		case size, ok := <-resize:
			if !ok {
				resize = nil
				continue
			}
			err := r.p.Tasks.ResizePty(ctx, c.Sandbox.ID, c.ID, execID, size)
			if err != nil {
				r.p.Log.DebugContext(ctx, "terminal not resized", slog.String("container_id", c.ID), slog.Any("error", err))
			}
		case <-stdinDone:
			stdinDone = nil
			err := r.p.Tasks.CloseIO(ctx, c.Sandbox.ID, c.ID, execID)
			if err != nil {
				r.p.Log.DebugContext(ctx, "stdin not closed", slog.String("container_id", c.ID), slog.Any("error", err))
			}
		case <-timeout:
			return 0, errors.Join(fmt.Errorf("exec in container %q: after %v: %w", c.ID, req.Timeout, ErrTimeout), r.killExec(ctx, c, execID, end))
		case <-ctx.Done():
			return 0, errors.Join(context.Cause(ctx), r.killExec(ctx, c, execID, end))
		}
	}
}

// finish delivers the last output of an ended exec, until deadline or a moment longer if that is
// not zero: who gave the command a time does not wait longer for what it has left behind.
func (r *Runner) finish(ctx context.Context, io port.ExecIO, w waited, deadline time.Time) (int32, error) {
	if w.err != nil {
		return 0, fmt.Errorf("exec: %w", w.err)
	}
	limit := drainTime
	if !deadline.IsZero() {
		limit = min(limit, max(time.Until(deadline), lastTime))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := io.Drain(ctx)
	if err != nil {
		r.p.Log.DebugContext(ctx, "output of an exec is still open after its end", slog.Any("error", err))
	}
	return int32(w.exit.Code), nil
}

// killExec kills a started exec with what it has started, and waits for its end.
func (r *Runner) killExec(ctx context.Context, c *table.Container, execID string, end <-chan waited) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
	defer cancel()
	err := r.p.Tasks.Kill(ctx, c.Sandbox.ID, c.ID, execID, syscall.SIGKILL, false)
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

// deleteExec deletes an ended exec; a deletion that takes long is repeated beside its caller.
func (r *Runner) deleteExec(ctx context.Context, c *table.Container, execID string) {
	remove := func(ctx context.Context) error {
		_, err := r.p.Tasks.Delete(ctx, c.Sandbox.ID, c.ID, execID)
		return err
	}
	soon, cancel := context.WithTimeout(ctx, deleteTime)
	defer cancel()
	err := remove(soon)
	if err != nil && soon.Err() != nil {
		r.p.Work.Start(ctx, killTime, func(ctx context.Context) error {
			r.deleted(ctx, c, remove(ctx))
			return nil
		})
		return
	}
	r.deleted(ctx, c, err)
}

// deleted tells of an exec whose deletion failed.
func (r *Runner) deleted(ctx context.Context, c *table.Container, err error) {
	if err != nil && !errdefs.IsNotFound(err) {
		r.p.Log.WarnContext(ctx, "exec remains until its container ends", slog.String("container_id", c.ID), slog.Any("error", err))
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
func (r *Runner) Attach(ctx context.Context, id string, req AttachRequest) error {
	c, err := r.p.Table.Running(id)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if req.Started != nil {
		req.Started()
	}
	r.p.Work.Go(func(context.Context) {
		for {
			select {
			case <-ctx.Done():
				return
			case size, ok := <-req.Resize:
				if !ok {
					return
				}
				err := r.p.Tasks.ResizePty(ctx, c.Sandbox.ID, c.ID, "", size)
				if err != nil {
					r.p.Log.DebugContext(ctx, "terminal not resized", slog.String("container_id", c.ID), slog.Any("error", err))
				}
			}
		}
	})
	return r.p.IO.Attach(ctx, c.ID, req.Streams)
}

// ReopenLog opens a running container's log anew.
func (r *Runner) ReopenLog(ctx context.Context, id string) error {
	c, err := r.p.Table.Running(id)
	if err != nil {
		return err
	}
	return r.p.IO.ReopenLog(ctx, c.ID)
}

// CloseStdin tells a container's shim that its input has ended.
func (r *Runner) CloseStdin(ctx context.Context, id string) {
	c, err := r.p.Table.Container(id)
	if err != nil {
		return
	}
	err = r.p.Tasks.CloseIO(ctx, c.Sandbox.ID, id, "")
	if err != nil {
		r.p.Log.DebugContext(ctx, "stdin not closed", slog.String("container_id", id), slog.Any("error", err))
	}
}
