// Package limited is a connection on which each call has its time: how long each method may
// take is in one table here.
package limited

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/internal/rpc"
)

const (
	unlimited    = time.Duration(0)
	usualLimit   = 2 * time.Minute
	sandboxLimit = 4 * time.Minute
	// margin is what a call gets on top of the time that its request names.
	margin = 2 * time.Minute
	// connectTime is what it takes at most to connect to a server that is there.
	connectTime = 500 * time.Millisecond
)

// limitOf returns how long a unary call may take; zero means as long as the caller's
// context allows.
func limitOf(method string, req any) time.Duration {
	switch method {
	case sandboxv1.SandboxService_PrepareSandbox_FullMethodName,
		sandboxv1.SandboxService_QuiesceSandbox_FullMethodName,
		sandboxv1.SandboxService_StopSandbox_FullMethodName,
		sandboxv1.SandboxService_RemoveSandbox_FullMethodName:
		return sandboxLimit
	case imagev1.ImageService_PullImage_FullMethodName:
		return unlimited
	case containerv1.ContainerService_StopContainer_FullMethodName, containerv1.ContainerService_ExecSync_FullMethodName,
		containerv1.ContainerService_CheckpointContainer_FullMethodName, sandboxv1.SandboxService_CheckpointSandbox_FullMethodName:
		return ownTimeout(req)
	}
	return usualLimit
}

// ownTimeout is the limit of a call that brings its own timeout.
func ownTimeout(req any) time.Duration {
	switch r := req.(type) {
	case *containerv1.StopContainerRequest:
		return seconds(r.GetTimeoutSeconds()) + margin
	case *containerv1.ExecSyncRequest:
		if timeout := seconds(r.GetTimeoutSeconds()); timeout > 0 {
			return timeout + margin
		}
		return unlimited
	case *containerv1.CheckpointContainerRequest:
		if r.GetTimeout() == nil {
			return unlimited // sandboxd has a limit for it
		}
		return seconds(r.GetTimeout().GetSeconds()) + margin
	case *sandboxv1.CheckpointSandboxRequest:
		return seconds(r.GetTimeout().GetSeconds()) + margin
	}
	return usualLimit
}

// seconds converts without overflow; the result leaves room for the margin.
func seconds(n int64) time.Duration {
	const most = int64((math.MaxInt64 - margin) / time.Second)
	return time.Duration(min(max(n, 0), most)) * time.Second
}

// waitOf returns how long a call may wait for a server that is away.
func waitOf(method string, hold time.Duration) time.Duration {
	if method == nodev1.NodeService_GetStatus_FullMethodName {
		return 0 // what is wrong is to be said, not waited out
	}
	return hold
}

// isStanding tells of the streams that are kept up by loops of their own, which have all
// the time to wait for the server.
func isStanding(method string) bool {
	return method == nodev1.NodeService_OpenSession_FullMethodName ||
		method == nriv1.HubService_Connect_FullMethodName
}

// Conn gives every unary call its time limit, and bounds how long a call waits
// for a server that is away. Streams, once open, live as long as their context.
type Conn struct {
	conn  *grpc.ClientConn
	calls grpc.ClientConnInterface
	hold  time.Duration
}

var _ grpc.ClientConnInterface = Conn{}

// New returns conn with limits. Unary calls go over calls, which is conn or stands on it. hold
// is how long a call waits for a server that is away before it is Unavailable.
func New(conn *grpc.ClientConn, calls grpc.ClientConnInterface, hold time.Duration) Conn {
	return Conn{conn: conn, calls: calls, hold: hold}
}

// Invoke implements grpc.ClientConnInterface.
func (c Conn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if err := c.awaitServer(ctx, waitOf(method, c.hold)); err != nil {
		return err
	}
	opts = append(slices.Clip(opts), grpc.WaitForReady(false), rpc.WithTimeout(limitOf(method, args)))
	return c.calls.Invoke(ctx, method, args, reply, opts...)
}

// NewStream implements grpc.ClientConnInterface.
func (c Conn) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if isStanding(method) {
		return c.conn.NewStream(ctx, desc, method, opts...)
	}
	if err := c.awaitServer(ctx, c.hold); err != nil {
		return nil, err
	}
	return c.conn.NewStream(ctx, desc, method, append(slices.Clip(opts), grpc.WaitForReady(false))...)
}

// awaitServer waits until the server is connected, at most d. Errors: Unavailable, the
// cause of ctx's end.
func (c Conn) awaitServer(ctx context.Context, d time.Duration) error {
	state := c.conn.GetState()
	if state == connectivity.Ready {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, max(d, connectTime))
	defer cancel()
	for state != connectivity.Ready {
		if state == connectivity.Idle {
			c.conn.Connect()
		}
		if !c.conn.WaitForStateChange(wait, state) {
			if ctx.Err() != nil {
				return fmt.Errorf("waiting for %s: %w", c.conn.Target(), context.Cause(ctx))
			}
			return fmt.Errorf("no connection to %s: %w", c.conn.Target(), errdefs.ErrUnavailable)
		}
		state = c.conn.GetState()
	}
	return nil
}
