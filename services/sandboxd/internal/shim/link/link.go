// Package link is a connection to a running shim: dialling, the task service in its
// versions 2 and 3, and the sandbox service, over ttrpc or gRPC.
//
// Errors come back as errdefs sentinels; a lost connection is ErrUnavailable. A connection
// may be used concurrently. It is never re-established here: that is for its owner, who
// learns of the loss by Closed.
package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Protocols that a shim can speak.
const (
	ProtocolTTRPC = "ttrpc"
	ProtocolGRPC  = "grpc"
)

// closeLag bounds the time between the failure of a call and the end of its connection.
const closeLag = time.Second

// Names of the services of a shim.
const (
	serviceTaskV2  = "containerd.task.v2.Task"
	serviceTaskV3  = "containerd.task.v3.Task"
	serviceSandbox = "containerd.runtime.sandbox.v1.Sandbox"
)

// Endpoint says where a shim listens and what it speaks.
type Endpoint struct {
	// Version is the version of the task service, 2 or 3.
	Version int
	// Address is "unix://" with a path, or the name of an abstract socket.
	Address string
	// Protocol is ProtocolTTRPC or ProtocolGRPC.
	Protocol string
}

// SocketPath is the path of the endpoint's socket; empty if it has none in the file system.
func (e Endpoint) SocketPath() string {
	path, ok := strings.CutPrefix(e.Address, "unix://")
	if !ok {
		return ""
	}
	return path
}

// network and name for the dialer.
func (e Endpoint) socket() (string, error) {
	scheme, rest, ok := strings.Cut(e.Address, "://")
	switch {
	case !ok:
		// Without a scheme the old shims mean an abstract socket.
		return "\x00" + e.Address, nil
	case scheme == "unix":
		return rest, nil
	default:
		return "", fmt.Errorf("shim address %q: scheme %q: %w", e.Address, scheme, errdefs.ErrNotImplemented)
	}
}

// Conn is a connection to one shim.
type Conn struct {
	invoke func(ctx context.Context, service, method string, req, resp proto.Message) error
	close  func() error
	closed chan struct{}
}

// Dial connects once. The options apply to ttrpc connections.
func Dial(ctx context.Context, e Endpoint, opts ...ttrpc.ClientOpts) (*Conn, error) {
	address, err := e.socket()
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", address)
	if err != nil {
		return nil, fmt.Errorf("shim address %q: %w: %w", e.Address, err, errdefs.ErrUnavailable)
	}
	if e.Protocol == ProtocolGRPC {
		return dialGRPC(nc, address)
	}
	return newTTRPC(nc, opts), nil
}

func newTTRPC(nc net.Conn, opts []ttrpc.ClientOpts) *Conn {
	c := &Conn{closed: make(chan struct{})}
	opts = append(slices.Clip(opts), ttrpc.WithOnClose(func() { close(c.closed) }))
	client := ttrpc.NewClient(nc, opts...)
	c.invoke = func(ctx context.Context, service, method string, req, resp proto.Message) error {
		return client.Call(ctx, service, method, req, resp)
	}
	c.close = client.Close
	return c
}

// dialGRPC hands the one connection to a gRPC client. When it breaks, the client is closed
// rather than left to dial anew: a shim that is gone must be seen as gone.
func dialGRPC(first net.Conn, address string) (*Conn, error) {
	c := &Conn{closed: make(chan struct{})}
	var once sync.Once
	done := func() { once.Do(func() { close(c.closed) }) }
	used := make(chan net.Conn, 1)
	used <- &watchedConn{Conn: first, onClose: done}
	cc, err := grpc.NewClient("passthrough:///"+strings.TrimPrefix(address, "\x00"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case nc := <-used:
				return nc, nil
			default:
				return nil, net.ErrClosed
			}
		}))
	if err != nil {
		return nil, errors.Join(err, first.Close())
	}
	if cc.GetState() == connectivity.Idle {
		cc.Connect()
	}
	c.invoke = func(ctx context.Context, service, method string, req, resp proto.Message) error {
		return cc.Invoke(ctx, "/"+service+"/"+method, req, resp)
	}
	c.close = func() error {
		done()
		return cc.Close()
	}
	return c, nil
}

// watchedConn tells when a connection is closed or has failed.
type watchedConn struct {
	net.Conn
	onClose func()
}

// Read reads and notices the end of the connection.
func (w *watchedConn) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if err != nil {
		w.onClose()
	}
	return n, err
}

// Close closes the connection.
func (w *watchedConn) Close() error {
	w.onClose()
	return w.Conn.Close()
}

// Closed is closed when the connection has ended, whoever ended it.
func (c *Conn) Closed() <-chan struct{} { return c.closed }

// Close ends the connection. The shim is not told and lives on.
func (c *Conn) Close() error { return c.close() }

// Task calls a method of the task service in the given version. The messages of both
// versions are the same on the wire.
func (c *Conn) Task(ctx context.Context, version int, method string, req, resp proto.Message) error {
	service := serviceTaskV3
	if version == 2 {
		service = serviceTaskV2
	}
	return c.call(ctx, service, method, req, resp)
}

// Sandbox calls a method of the sandbox service.
func (c *Conn) Sandbox(ctx context.Context, method string, req, resp proto.Message) error {
	return c.call(ctx, serviceSandbox, method, req, resp)
}

func (c *Conn) call(ctx context.Context, service, method string, req, resp proto.Message) error {
	err := c.invoke(namespaces.WithNamespace(ctx, pod.Namespace), service, method, req, resp)
	if err == nil {
		return nil
	}
	return fmt.Errorf("shim %s: %w", method, c.native(ctx, err))
}

// native gives an error its errdefs sentinel.
func (c *Conn) native(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, ttrpc.ErrClosed), errors.Is(err, ttrpc.ErrStreamClosed):
		c.awaitClosed(ctx)
		return fmt.Errorf("connection lost: %w", errdefs.ErrUnavailable)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case ctx.Err() != nil:
		// The transport reports the end of a context in words of its own, and what the shim says
		// in the same moment may be no more than its own view of that end.
		return fmt.Errorf("%w: %v", ctx.Err(), err) //nolint:errorlint // the class of the answer must not show
	}
	native := errgrpc.ToNative(err)
	select {
	case <-c.closed:
		return fmt.Errorf("connection lost: %w: %w", native, errdefs.ErrUnavailable)
	default:
	}
	if errdefs.IsUnknown(native) {
		// Shims give the failures of OCI runtimes no kind.
		return fmt.Errorf("%s: %w", native.Error(), errdefs.ErrInternal)
	}
	return native
}

// awaitClosed waits a moment until the loss of the connection shows in Closed too, which
// ttrpc tells a little later: who learns of the loss by a call must not find the connection
// still in order when looking at it, and use it again.
func (c *Conn) awaitClosed(ctx context.Context) {
	t := time.NewTimer(closeLag)
	defer t.Stop()
	select {
	case <-c.closed:
	case <-ctx.Done():
	case <-t.C:
	}
}
