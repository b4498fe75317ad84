package unixsock

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Peer is the process at the other end of a connection, as the kernel saw it when the
// connection was made.
type Peer struct {
	PID      int32
	UID, GID uint32
}

// PeerOf asks the kernel for the peer of c. A connection that is not a unix socket
// gives errdefs.ErrInvalidArgument.
func PeerOf(c net.Conn) (Peer, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return Peer{}, fmt.Errorf("peer of %T: not a socket: %w", c, errdefs.ErrInvalidArgument)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("peer: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, credErr); err != nil {
		return Peer{}, fmt.Errorf("peer: %w", err)
	}
	if c.LocalAddr().Network() != "unix" {
		return Peer{}, fmt.Errorf("peer: not a unix socket: %w", errdefs.ErrInvalidArgument)
	}
	return Peer{PID: cred.Pid, UID: cred.Uid, GID: cred.Gid}, nil
}
