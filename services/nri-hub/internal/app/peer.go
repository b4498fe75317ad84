package app

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/unixsock"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/plugin"
)

// peer asks the kernel who is at the other end. The program is left empty if it cannot be
// told for certain: if the hub may not see it, or if the process has ended meanwhile and
// its number may be another's.
func peer(c net.Conn) (plugin.Peer, error) {
	p, err := unixsock.PeerOf(c)
	if err != nil {
		return plugin.Peer{}, err
	}
	return plugin.Peer{PID: p.PID, UID: p.UID, GID: p.GID, Executable: executable(c, p.PID)}, nil
}

func executable(c net.Conn, pid int32) string {
	fd, err := peerProcess(c)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	path, err := os.Readlink("/proc/" + strconv.Itoa(int(pid)) + "/exe")
	if err != nil || unix.PidfdSendSignal(fd, 0, nil, 0) != nil {
		return ""
	}
	return path
}

// peerProcess is a descriptor of the peer's process, which no other process can take over.
func peerProcess(c net.Conn) (int, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return 0, fmt.Errorf("%T is no socket", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var fd int
	var optErr error
	err = raw.Control(func(s uintptr) { fd, optErr = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD) })
	if err == nil {
		err = optErr
	}
	return fd, err
}
