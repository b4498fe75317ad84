package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/console"
	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/stdio"
)

// execsTime bounds the wait for the execs of a container whose first process has ended.
const execsTime = 3 * time.Second

// State is where a process is in its life.
type State int

// The states of a process.
const (
	Created State = iota
	Running
	Paused
	Stopped
)

// Process is a process of a container.
type Process struct {
	c      *Container
	execID string
	cfg    stdio.Config
	args   []byte // of an exec: its description in JSON

	// busy is held by whoever changes or publishes the life of the process, one at a time.
	busy chan struct{}
	// done is closed when the process has ended.
	done chan struct{}
	// told is closed when the end has been published.
	told chan struct{}

	// mu guards the rest.
	mu      sync.Mutex
	state   State
	deleted bool
	child   *reaper.Child
	streams *stdio.Streams
	exit    reaper.Exit
}

func newProcess(c *Container, execID string, cfg stdio.Config) *Process {
	cfg.UID, cfg.GID = int(c.spec.Options.GetIoUid()), int(c.spec.Options.GetIoGid())
	cfg.ID, cfg.Namespace, cfg.Monitor = c.spec.ID, c.host.Namespace, c.host.Reaper.Monitor()
	return &Process{
		c: c, execID: execID, cfg: cfg,
		busy: make(chan struct{}, 1), done: make(chan struct{}), told: make(chan struct{}),
	}
}

func (p *Process) acquire(ctx context.Context) error {
	select {
	case p.busy <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *Process) release() { <-p.busy }

// ExecID is the id of an exec; empty for a first process.
func (p *Process) ExecID() string { return p.execID }

// Names are the names of the streams.
func (p *Process) Names() stdio.Config { return p.cfg }

// Pid is the process id; 0 before there is one.
func (p *Process) Pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child == nil {
		return 0
	}
	return p.child.Pid()
}

// State is the state, and the end of a stopped process.
func (p *Process) State() (State, reaper.Exit) {
	p.c.mu.Lock()
	paused := p.c.paused
	p.c.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == Running && paused {
		return Paused, p.exit
	}
	return p.state, p.exit
}

// Streams are the streams; nil before there are some.
func (p *Process) Streams() *stdio.Streams {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.streams
}

// Wait waits for the end of the process.
func (p *Process) Wait(ctx context.Context) (reaper.Exit, error) {
	select {
	case <-p.done:
	case <-ctx.Done():
		return reaper.Exit{}, context.Cause(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exit, nil
}

// connect opens the streams and connects them with the process that run lets the runtime
// make.
func (p *Process) connect(ctx context.Context, run func(runc.ConsoleSocket, runc.IO) error) error {
	s, err := stdio.Open(ctx, p.cfg, p.c.host.Log)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.streams = s
	p.mu.Unlock()
	if !p.cfg.Terminal {
		if err := run(nil, s); err != nil {
			return err
		}
		return s.Run(nil)
	}
	socket, err := runc.NewTempConsoleSocket()
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	defer func() { _ = socket.Close() }()
	if err := run(socket, nil); err != nil {
		return err
	}
	var master console.Console
	if master, err = attachConsole(socket); err != nil {
		return err
	}
	return s.Run(master)
}

// disconnect closes the streams.
func (p *Process) disconnect() error {
	if s := p.Streams(); s != nil {
		return s.Close()
	}
	return nil
}

// claim follows the process that the runtime made.
func (p *Process) claim(hold *reaper.Hold, pid int) {
	// The end may be told at once, and is not to be seen before the beginning.
	p.mu.Lock()
	defer p.mu.Unlock()
	p.child = hold.Claim(pid, p.ended)
}

// ended deals with the end of the process.
func (p *Process) ended(e reaper.Exit) {
	if p.execID == "" {
		p.c.end(e)
	}
	p.mu.Lock()
	p.state, p.exit = Stopped, e
	p.mu.Unlock()
	close(p.done)
	// A start in progress is published first.
	p.busy <- struct{}{}
	defer p.release()
	if p.execID == "" {
		p.c.endExecs()
		p.c.publishOOM()
	}
	p.c.host.Publish("/tasks/exit", &events.TaskExit{
		ContainerID: p.c.spec.ID, ID: p.id(), Pid: uint32(e.Pid), ExitStatus: uint32(e.Status), ExitedAt: timestamppb.New(e.At),
	})
	close(p.told)
}

// id is the id of the process in events.
func (p *Process) id() string {
	if p.execID == "" {
		return p.c.spec.ID
	}
	return p.execID
}

// end notes the end of the first process: it is saved, and what it left behind is ended.
func (c *Container) end(e reaper.Exit) {
	if err := saveExit(c.spec.Bundle, e); err != nil {
		c.host.Log.Error("exit not saved", slog.String("container_id", c.spec.ID), slog.String("error", err.Error()))
	}
	c.mu.Lock()
	c.over, c.paused = true, false
	c.mu.Unlock()
	if !c.ownPids {
		// The kernel does this only for a process namespace of the container's own.
		if err := c.Processes().Signal(unix.SIGKILL); err != nil {
			c.host.Log.Warn("processes of an ended container", slog.String("container_id", c.spec.ID), slog.String("error", err.Error()))
		}
	}
}

// endExecs waits for the ends of execs, those that are just being started included, so that
// the end of the container comes last.
func (c *Container) endExecs() {
	t := time.NewTimer(execsTime)
	defer t.Stop()
	for _, p := range c.Execs() {
		select {
		case p.busy <- struct{}{}:
			p.release()
		case <-t.C:
			return
		}
		if state, _ := p.State(); state == Created {
			continue
		}
		select {
		case <-p.told:
		case <-t.C:
			return
		}
	}
}

// isOver says whether the first process has ended.
func (c *Container) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

// Signal sends a signal to the process. It fails with ErrNotFound if it has ended.
func (p *Process) Signal(sig unix.Signal) error { return p.signal((*reaper.Child).Signal, sig) }

// SignalGroup sends a signal to the process and those of its process group: what it has started,
// and has not put into a group of its own. It fails with ErrNotFound if the process has ended.
func (p *Process) SignalGroup(sig unix.Signal) error {
	return p.signal((*reaper.Child).SignalGroup, sig)
}

func (p *Process) signal(send func(*reaper.Child, unix.Signal) error, sig unix.Signal) error {
	p.mu.Lock()
	child, state := p.child, p.state
	p.mu.Unlock()
	switch {
	case state == Stopped:
		return fmt.Errorf("process %q has ended: %w", p.id(), errdefs.ErrNotFound)
	case child == nil:
		return fmt.Errorf("process %q is not started: %w", p.id(), errdefs.ErrFailedPrecondition)
	}
	return send(child, sig)
}

// refusal says why a process cannot be started.
func (p *Process) refusal() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.deleted:
		return fmt.Errorf("process %q is deleted: %w", p.id(), errdefs.ErrNotFound)
	case p.state == Created:
		return nil
	case p.state == Stopped:
		return fmt.Errorf("process %q has ended: %w", p.id(), errdefs.ErrFailedPrecondition)
	default:
		return fmt.Errorf("process %q is running: %w", p.id(), errdefs.ErrFailedPrecondition)
	}
}

// setRunning notes a start; a process that has ended meanwhile stays ended.
func (p *Process) setRunning() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == Created {
		p.state = Running
	}
}

// errOver says that a container has ended.
var errOver = errors.New("container is not running")
