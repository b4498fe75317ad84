package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

const (
	reconnectFirst = 50 * time.Millisecond
	reconnectMost  = 5 * time.Second
)

// watch looks after a shim in the background until it is dead or the manager is closed.
func (m *Manager) watch(i *Instance) {
	m.wg.Go(func() {
		for {
			i.mu.Lock()
			conn, s := i.conn, i.state
			i.mu.Unlock()
			if s == stateRunning {
				select {
				case <-conn.Closed():
				case <-m.base.Done():
					return
				}
			}
			if i.isClosing() || m.base.Err() != nil {
				return
			}
			i.set(stateLost)
			if s == stateRunning {
				i.log.WarnContext(m.base, "connection to shim lost")
			}
			switch err := i.reconnect(m.base); {
			case err == nil:
				i.log.InfoContext(m.base, "connection to shim restored")
			case m.base.Err() != nil || i.isClosing():
				return
			default:
				i.log.WarnContext(m.base, "shim is dead", slog.String("error", err.Error()))
				i.bury(m.base)
				return
			}
		}
	})
}

func (i *Instance) isClosing() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.closing
}

// reconnect tries to connect for as long as the shim's process exists. A shim that does not
// answer is waited for; one that has stopped listening is killed after the time to load.
func (i *Instance) reconnect(ctx context.Context) error {
	var deaf time.Time
	for delay := reconnectFirst; ; delay = min(2*delay, reconnectMost) {
		err := i.tryConnect(ctx)
		if err == nil || ctx.Err() != nil || i.isClosing() {
			return err
		}
		if len(procs.In(i.bundle.Dir())) == 0 {
			return err
		}
		switch {
		case !errors.Is(err, errNoListener):
			deaf = time.Time{}
		case deaf.IsZero():
			deaf = time.Now()
		case time.Since(deaf) > i.m.cfg.Timeouts.Load:
			kctx, cancel := context.WithTimeout(ctx, i.m.cfg.Timeouts.Cleanup)
			defer cancel()
			return errors.Join(err, procs.KillIn(kctx, i.bundle.Dir()))
		}
		if !pause.For(ctx, delay) {
			return context.Cause(ctx)
		}
	}
}

// tryConnect connects within the time to load.
func (i *Instance) tryConnect(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, i.m.cfg.Timeouts.Load,
		fmt.Errorf("no answer within %s: %w", i.m.cfg.Timeouts.Load, errdefs.ErrUnavailable))
	defer cancel()
	return i.connect(ctx)
}

// bury cleans up after a dead shim: all containers side by side, each with limits of its own.
func (i *Instance) bury(ctx context.Context) {
	ids, err := i.bundle.Containers()
	if err != nil {
		i.log.ErrorContext(ctx, "containers of dead shim not listed", slog.String("error", err.Error()))
	}
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			e := i.clean(ctx, id)
			i.mu.Lock()
			i.exits[id] = e
			i.mu.Unlock()
		})
	}
	wg.Wait()
	i.mu.Lock()
	e := i.endpoint
	i.mu.Unlock()
	i.m.sockets.Remove(e.SocketPath(), i.bundle.Dir())
	if err := i.m.sockets.RemovePassing(i.ID()); err != nil {
		i.log.WarnContext(ctx, "files of dead shim", slog.String("error", err.Error()))
	}
	i.set(stateDead)
}

// clean ends and removes what a dead shim left of a container, except for its bundle, and
// returns the container's exit.
func (i *Instance) clean(ctx context.Context, id string) pod.Exit {
	return i.m.cleaner.Container(ctx, i.log, i.bundle, i.meta, id)
}

// Thaw thaws what is frozen of a container's control group, as far as it is found.
func (i *Instance) Thaw(containerID string) {
	path, err := bundle.CgroupsPath(i.bundle.ContainerDir(containerID))
	if err != nil {
		return
	}
	if g, err := cgroup.Find(containerID, path); err == nil {
		g.Thaw()
	}
}

// processes are processes that belong together.
type processes interface {
	Pids() ([]int, error)
	Kill(ctx context.Context) error
}

// processes finds the processes of a container in its control group, or, if it was made without
// one, by its root file system.
func (i *Instance) processes(containerID string) (of processes, where string, err error) {
	dir := i.bundle.ContainerDir(containerID)
	path, err := bundle.CgroupsPath(dir)
	if err != nil {
		return nil, "", err
	}
	if path == "" {
		root := filepath.Join(dir, "rootfs")
		return procs.Rooted(root), "root " + root, nil
	}
	g, err := cgroup.Find(containerID, path)
	return g, "control group " + path, err
}

// KillAll kills every process in the control group of a container without the shim's help,
// within ctx. That they are gone is the end of the container, whether or not the shim ever
// tells it. It fails with ErrUnavailable if the container's processes are somewhere else.
func (i *Instance) KillAll(ctx context.Context, containerID string) error {
	dir := i.bundle.ContainerDir(containerID)
	g, where, err := i.processes(containerID)
	if err != nil {
		return err
	}
	pids, err := g.Pids()
	if err != nil {
		return err
	}
	first := bundle.ReadPid(dir, "")
	struck := i.noteStruck(containerID, slices.Contains(pids, int(first)))
	if err := g.Kill(ctx); err != nil {
		return err
	}
	e, err := bundle.ReadExit(dir)
	switch {
	case err == nil:
	case struck:
		e = pod.Exit{Pid: first, Code: pod.ExitCodeKilled, At: time.Now()}
	case first == 0 || procs.Running(int(first)):
		// Such as the processes in a virtual machine.
		return fmt.Errorf("container %q: its first process is not in %s: %w", containerID, where, errdefs.ErrUnavailable)
	default:
		// It had ended before, and only its shim knows how.
		e = pod.Exit{Pid: first, Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}
	}
	i.noteKilled(containerID, e)
	return nil
}

// EndRest ends what an ended container has left running, where containers have no control groups: not
// every shim finds it then.
func (i *Instance) EndRest(ctx context.Context, containerID string) error {
	if !i.m.cfg.NoGroups {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, i.m.cfg.Timeouts.Cleanup)
	defer cancel()
	return procs.Rooted(filepath.Join(i.bundle.ContainerDir(containerID), "rootfs")).Kill(ctx)
}

// RemoveContainer removes the bundle of a container that its shim has deleted.
func (i *Instance) RemoveContainer(containerID string) error {
	if err := i.bundle.RemoveContainer(containerID); err != nil {
		return err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.exits, containerID)
	delete(i.killed, containerID)
	delete(i.struck, containerID)
	return nil
}

// Discard removes a container without its shim, which does not know it, does not know it any
// more, or does not answer: what is left of it and its bundle. It returns the container's exit
// as far as it is known, and fails with ErrNotFound if there is no bundle. The caller has the
// turn of the removal.
func (i *Instance) Discard(ctx context.Context, containerID string) (pod.Exit, error) {
	if !i.bundle.HasContainer(containerID) {
		return pod.Exit{}, fmt.Errorf("container %q: %w", containerID, errdefs.ErrNotFound)
	}
	e, known := i.Exit(containerID)
	if !i.isClean(containerID) {
		found := i.clean(ctx, containerID)
		if !known {
			e = found
		}
	}
	return e, i.RemoveContainer(containerID)
}

// TakeRemoval waits for the turn to remove a container, which one caller at a time has: whoever
// comes while the shim has forgotten the container and its bundle is still there must not take it
// for a dead shim's.
func (i *Instance) TakeRemoval(ctx context.Context, containerID string) (done func(), err error) {
	for {
		i.mu.Lock()
		other := i.removals[containerID]
		if other == nil {
			own := make(chan struct{})
			i.removals[containerID] = own
			i.mu.Unlock()
			return func() {
				i.mu.Lock()
				delete(i.removals, containerID)
				i.mu.Unlock()
				close(own)
			}, nil
		}
		i.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
