package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
)

// Dial connects to a TCP port on the loopback interface of a network namespace, first by
// IPv4, then by IPv6; an empty path means the node's own. Errors: ErrInvalidArgument for a
// bad port, ErrUnavailable if nothing listens or the namespace is gone.
func (c *CNI) Dial(ctx context.Context, netnsPath string, port int) (net.Conn, error) {
	if port <= 0 || port > 65535 {
		return nil, fmt.Errorf("port %d: %w", port, errdefs.ErrInvalidArgument)
	}
	var conn net.Conn
	// A socket belongs to the namespace that its thread was in when it was made, and a
	// dial to a literal address makes it on the caller's thread.
	err := namespaces.Enter(func() error {
		var err error
		conn, err = dialLoopback(ctx, port)
		return err
	}, netnsPath)
	if err != nil {
		return nil, fmt.Errorf("port %d: %w: %w", port, err, errdefs.ErrUnavailable)
	}
	return conn, nil
}

func dialLoopback(ctx context.Context, port int) (net.Conn, error) {
	var d net.Dialer
	conn, err4 := d.DialContext(ctx, "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err4 == nil {
		return conn, nil
	}
	conn, err6 := d.DialContext(ctx, "tcp6", net.JoinHostPort("::1", strconv.Itoa(port)))
	if err6 == nil {
		return conn, nil
	}
	return nil, errors.Join(err4, err6)
}
