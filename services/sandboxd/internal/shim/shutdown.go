package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

// Shutdown ends the shim of a sandbox and removes everything that it and this package hold
// for the sandbox. A shim that does not end when told to is killed. The work is bounded by
// limits of its own and goes on when ctx ends. An unknown sandbox is not an error; after an
// error the call can be repeated.
func (m *Manager) Shutdown(ctx context.Context, sandboxID string) error {
	ctx = context.WithoutCancel(ctx)
	i, err := m.Get(sandboxID)
	if errdefs.IsNotFound(err) {
		return m.removeUnknown(ctx, sandboxID)
	}
	if err != nil {
		return err
	}
	i.mu.Lock()
	if i.abort != nil {
		i.abort()
	}
	i.mu.Unlock()
	if err := i.acquire(ctx); err != nil {
		return err
	}
	defer i.free()
	i.end(ctx)
	return i.discard(ctx)
}

// ExpectEnd says that the shim is going to be told to end, by other means than Shutdown, which
// must follow: the end of the connection is then no surprise.
func (i *Instance) ExpectEnd() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.closing = true
}

// removeUnknown removes the rests of a sandbox that has no entry.
func (m *Manager) removeUnknown(ctx context.Context, sandboxID string) error {
	b, err := bundle.Open(m.cfg.Dir, sandboxID)
	if err != nil {
		return nil //nolint:nilerr // such an id cannot have anything
	}
	if _, err := os.Lstat(b.Dir()); err != nil {
		return m.sockets.RemovePassing(sandboxID) // nothing else is left
	}
	meta, err := b.Meta()
	if err != nil {
		m.log.WarnContext(ctx, "sandbox bundle without description",
			slog.String("sandbox_id", sandboxID), slog.String("error", err.Error()))
	}
	return m.newInstance(b, meta).discard(ctx)
}

// end tells a shim to end and waits for it as long as it may take.
func (i *Instance) end(ctx context.Context) {
	i.ExpectEnd()
	i.mu.Lock()
	conn, s := i.conn, i.state
	i.mu.Unlock()
	if s != stateRunning {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, i.m.cfg.Timeouts.Shutdown)
	defer cancel()
	err := i.Task(ctx, "Shutdown", &taskapi.ShutdownRequest{ID: i.ID()}, &emptypb.Empty{})
	if err != nil && !errdefs.IsUnavailable(err) {
		i.log.WarnContext(ctx, "shim shutdown", slog.String("error", err.Error()))
		return
	}
	if ids, err := i.bundle.Containers(); err != nil || len(ids) > 0 {
		// A shim that still has containers stays; it is killed and cleaned up after.
		return
	}
	select {
	case <-conn.Closed():
	case <-ctx.Done():
		i.log.WarnContext(ctx, "shim did not end in time")
		return
	}
	_ = procs.WaitGone(ctx, i.bundle.Dir())
}

// discard makes sure that nothing of a sandbox is left, and forgets it.
func (i *Instance) discard(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), i.limit(),
		fmt.Errorf("clean-up of sandbox %q took longer than %s: %w", i.ID(), i.limit(), errdefs.ErrUnavailable))
	defer cancel()

	err := errors.Join(i.release(), procs.KillIn(ctx, i.bundle.Dir()))
	ids, listErr := i.bundle.Containers()
	if listErr != nil && !errors.Is(listErr, os.ErrNotExist) {
		err = errors.Join(err, listErr)
	}
	for _, id := range ids {
		if !i.isClean(id) {
			i.clean(ctx, id)
		}
	}
	i.mu.Lock()
	e := i.endpoint
	i.mu.Unlock()
	i.m.sockets.Remove(e.SocketPath(), i.bundle.Dir())
	// The bundle is the last to go: the rest is found by it.
	if err = errors.Join(err, i.m.sockets.RemovePassing(i.ID()), i.bundle.Remove()); err != nil {
		i.set(stateDead)
		return fmt.Errorf("sandbox %q: %w", i.ID(), err)
	}
	i.set(stateGone)
	i.m.mu.Lock()
	if i.m.shims[i.ID()] == i {
		delete(i.m.shims, i.ID())
	}
	i.m.mu.Unlock()
	return nil
}

// limit bounds the removal of a sandbox: killing the shim, and two steps per container.
func (i *Instance) limit() time.Duration {
	ids, err := i.bundle.Containers()
	if err != nil {
		ids = nil
	}
	return time.Duration(1+2*len(ids)) * i.m.cfg.Timeouts.Cleanup
}
