package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/stdio"
)

// AddExec prepares a further process. It fails with ErrAlreadyExists if the id is taken.
func (c *Container) AddExec(execID string, process []byte, names stdio.Config) error {
	if err := checkID(execID); err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	p := newProcess(c, execID, names)
	p.args = process
	c.mu.Lock()
	defer c.mu.Unlock()
	switch _, taken := c.execs[execID]; {
	case taken:
		return fmt.Errorf("exec %q of container %q: %w", execID, c.spec.ID, errdefs.ErrAlreadyExists)
	case c.over:
		return fmt.Errorf("exec %q of container %q: %w: %w", execID, c.spec.ID, errOver, errdefs.ErrFailedPrecondition)
	}
	c.execs[execID] = p
	c.host.Publish("/tasks/exec-added", &events.TaskExecAdded{ContainerID: c.spec.ID, ExecID: execID})
	return nil
}

// Start starts a created process and returns its process id.
func (p *Process) Start(ctx context.Context) (int, error) {
	if err := p.acquire(ctx); err != nil {
		return 0, err
	}
	defer p.release()
	if err := p.refusal(); err != nil {
		return 0, err
	}
	if p.execID != "" {
		return p.startExec(ctx)
	}
	c := p.c
	if err := c.run(ctx); err != nil {
		return 0, fmt.Errorf("container %q: %w", c.spec.ID, err)
	}
	p.setRunning()
	c.host.Publish("/tasks/start", &events.TaskStart{ContainerID: c.spec.ID, Pid: uint32(p.Pid())})
	return p.Pid(), nil
}

// run runs the created first process, or restores it.
func (c *Container) run(ctx context.Context) error {
	if c.spec.Checkpoint != "" {
		return c.restore(ctx)
	}
	since := sizeOf(c.runc.Log)
	return runtimeError(c.runc.Start(ctx, c.spec.ID), "start", c.runc.Log, since)
}

func (p *Process) startExec(ctx context.Context) (int, error) {
	c := p.c
	fail := func(err error) error { return fmt.Errorf("exec %q of container %q: %w", p.execID, c.spec.ID, err) }
	if c.isOver() {
		return 0, fail(fmt.Errorf("%w: %w", errOver, errdefs.ErrFailedPrecondition))
	}
	var process specs.Process
	if err := json.Unmarshal(p.args, &process); err != nil {
		return 0, fail(fmt.Errorf("process: %w: %w", err, errdefs.ErrInvalidArgument))
	}
	process.Terminal = p.cfg.Terminal
	hold := c.host.Reaper.Hold()
	defer hold.Release()
	err := p.connect(ctx, func(socket runc.ConsoleSocket, io runc.IO) error {
		opts := &runc.ExecOpts{PidFile: p.pidFile(), LogFile: p.logFile(), Detach: true, IO: io}
		if socket != nil {
			opts.ConsoleSocket = socket
		}
		return runtimeError(c.runc.Exec(ctx, c.spec.ID, process, opts), "exec", p.logFile(), 0)
	})
	if err != nil {
		return 0, errors.Join(fail(err), p.disconnect())
	}
	pid, err := readPid(p.pidFile())
	if err != nil {
		return 0, errors.Join(fail(err), p.disconnect())
	}
	p.setRunning()
	p.claim(hold, pid)
	p.args = nil
	c.host.Publish("/tasks/exec-started", &events.TaskExecStarted{ContainerID: c.spec.ID, ExecID: p.execID, Pid: uint32(pid)})
	if c.isOver() {
		// The container ended while this was being started.
		_ = p.Signal(unix.SIGKILL)
	}
	return pid, nil
}

func (p *Process) pidFile() string { return filepath.Join(p.c.spec.Bundle, p.execID+".pid") }

func (p *Process) logFile() string { return filepath.Join(p.c.spec.Bundle, p.execID+".log.json") }

// DeleteExec removes an exec that has ended or was never started. It fails with
// ErrFailedPrecondition if it runs.
func (c *Container) DeleteExec(ctx context.Context, execID string) (*Process, error) {
	p, err := c.Process(execID)
	if err != nil {
		return nil, err
	}
	if err := p.acquire(ctx); err != nil {
		return nil, err
	}
	state, e := p.State()
	if state == Running || state == Paused {
		p.release()
		return nil, fmt.Errorf("exec %q of container %q is running: %w", execID, c.spec.ID, errdefs.ErrFailedPrecondition)
	}
	p.mu.Lock()
	p.deleted = true
	p.mu.Unlock()
	p.release()
	if state == Stopped {
		select {
		case <-p.told:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	err = p.disconnect()
	for _, path := range []string{p.pidFile(), p.logFile()} {
		if rmErr := os.Remove(path); rmErr != nil && !errors.Is(rmErr, os.ErrNotExist) {
			err = errors.Join(err, rmErr)
		}
	}
	c.mu.Lock()
	_, there := c.execs[execID]
	delete(c.execs, execID)
	c.mu.Unlock()
	if !there {
		return nil, fmt.Errorf("exec %q of container %q: %w", execID, c.spec.ID, errdefs.ErrNotFound)
	}
	if state == Stopped {
		c.publishDelete(p, e)
	}
	return p, err
}
