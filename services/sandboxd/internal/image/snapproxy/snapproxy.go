// Package snapproxy uses snapshotters that are processes of their own, such as those that load
// layers when they are read, over containerd's API on a unix socket.
//
// The connection is made by the first call that needs it, and made again after the process was
// away. A process that is away, or does not answer, is an [Error] that names it, after a
// bounded time; no other snapshotter waits for it. A Snapshotter is safe for concurrent use.
package snapproxy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	// callLimit bounds calls that only look or remove, makeLimit those that make a snapshot,
	// for which a lazy snapshotter asks the registry.
	callLimit = 30 * time.Second
	makeLimit = 2 * time.Minute
	// firstDelay and maxDelay are between attempts to reach a process that is away.
	firstDelay = 50 * time.Millisecond
	maxDelay   = time.Second
	// maxMessage is the largest message in either direction, in bytes; as in containerd.
	maxMessage = 16 << 20
)

// Snapshotter is a snapshotter in another process.
type Snapshotter struct {
	name, socket    string
	conn            *grpc.ClientConn
	next            snapshots.Snapshotter
	looking, making time.Duration // the limits
}

var (
	_ snapshots.Snapshotter = (*Snapshotter)(nil)
	_ snapshots.Cleaner     = (*Snapshotter)(nil)
)

// New returns the snapshotter of a name at a unix socket. It does not wait for its process. The
// caller owes a Close.
func New(name, socket string) (*Snapshotter, error) {
	conn, err := grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: firstDelay, Multiplier: 2, MaxDelay: maxDelay}, MinConnectTimeout: callLimit,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)))
	if err != nil {
		return nil, fmt.Errorf("proxy snapshotter %q at %s: %w", name, socket, err)
	}
	return &Snapshotter{
		name: name, socket: socket, conn: conn,
		next: proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(conn), name), looking: callLimit, making: makeLimit,
	}, nil
}

// Error says that the process of a snapshotter is away or does not answer.
type Error struct {
	name, socket string
	cause        error
}

// Error implements error.
func (e *Error) Error() string {
	return fmt.Sprintf("proxy snapshotter %q at %s: %v", e.name, e.socket, e.cause)
}

// Kind is ErrUnavailable.
func (e *Error) Kind() error { return errdefs.ErrUnavailable }

// Unwrap returns the kind before the cause: who looks for one takes the first.
func (e *Error) Unwrap() []error { return []error{e.Kind(), e.cause} }

// call makes one call within a limit.
func (s *Snapshotter) call(ctx context.Context, limit time.Duration, do func(context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := do(limited)
	switch {
	case err == nil, ctx.Err() != nil:
		return err
	case limited.Err() != nil, errors.Is(err, context.DeadlineExceeded): // the process may see the limit first
		return &Error{s.name, s.socket, fmt.Errorf("no answer within %v", limit)}
	case errdefs.IsUnavailable(err):
		return &Error{s.name, s.socket, err}
	}
	return err
}

// Stat implements snapshots.Snapshotter.
func (s *Snapshotter) Stat(ctx context.Context, key string) (info snapshots.Info, _ error) {
	err := s.call(ctx, s.looking, func(ctx context.Context) (err error) {
		info, err = s.next.Stat(ctx, key)
		return err
	})
	return info, err
}

// Update implements snapshots.Snapshotter.
func (s *Snapshotter) Update(ctx context.Context, change snapshots.Info, fields ...string) (info snapshots.Info, _ error) {
	err := s.call(ctx, s.looking, func(ctx context.Context) (err error) {
		info, err = s.next.Update(ctx, change, fields...)
		return err
	})
	return info, err
}

// Usage implements snapshots.Snapshotter.
func (s *Snapshotter) Usage(ctx context.Context, key string) (usage snapshots.Usage, _ error) {
	err := s.call(ctx, s.looking, func(ctx context.Context) (err error) {
		usage, err = s.next.Usage(ctx, key)
		return err
	})
	return usage, err
}

// Mounts implements snapshots.Snapshotter.
func (s *Snapshotter) Mounts(ctx context.Context, key string) (mounts []mount.Mount, _ error) {
	err := s.call(ctx, s.looking, func(ctx context.Context) (err error) {
		mounts, err = s.next.Mounts(ctx, key)
		return errors.Join(err, s.mountable(mounts))
	})
	return mounts, err
}

// Prepare implements snapshots.Snapshotter.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	return s.made(ctx, key, func(ctx context.Context) ([]mount.Mount, error) { return s.next.Prepare(ctx, key, parent, opts...) })
}

// View implements snapshots.Snapshotter.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	return s.made(ctx, key, func(ctx context.Context) ([]mount.Mount, error) { return s.next.View(ctx, key, parent, opts...) })
}

// made makes a snapshot, which is removed again if nobody could mount it.
func (s *Snapshotter) made(ctx context.Context, key string, do func(context.Context) ([]mount.Mount, error)) (mounts []mount.Mount, _ error) {
	err := s.call(ctx, s.making, func(ctx context.Context) (err error) {
		mounts, err = do(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := s.mountable(mounts); err != nil {
		return nil, errors.Join(err, s.Remove(ctx, key))
	}
	return mounts, nil
}

// mountable refuses mounts that neither the kernel nor a helper program makes: those with a
// slash in their type are instructions for containerd's mount manager.
func (s *Snapshotter) mountable(mounts []mount.Mount) error {
	for _, m := range mounts {
		if strings.Contains(m.Type, "/") {
			return fmt.Errorf("proxy snapshotter %q at %s: mounts of type %q are not supported: %w", s.name, s.socket, m.Type, errdefs.ErrNotImplemented)
		}
	}
	return nil
}

// Commit implements snapshots.Snapshotter.
func (s *Snapshotter) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	return s.call(ctx, s.making, func(ctx context.Context) error { return s.next.Commit(ctx, name, key, opts...) })
}

// Remove implements snapshots.Snapshotter.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	return s.call(ctx, s.looking, func(ctx context.Context) error { return s.next.Remove(ctx, key) })
}

// Walk implements snapshots.Snapshotter.
func (s *Snapshotter) Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error {
	return s.call(ctx, s.looking, func(ctx context.Context) error { return s.next.Walk(ctx, fn, filters...) })
}

// Cleanup implements snapshots.Cleaner.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	cleaner, ok := s.next.(snapshots.Cleaner)
	if !ok {
		return nil
	}
	return s.call(ctx, s.making, cleaner.Cleanup)
}

// Close ends the connection. What is under way fails.
func (s *Snapshotter) Close() error { return s.conn.Close() }
