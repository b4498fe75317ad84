package testkit

import (
	"net"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// ReservePort returns an address of the loopback interface on which only this test listens until it
// ends, as often as it likes, though maybe later and in another process. The port is bound all the
// while by a socket that does not listen: the kernel gives it to nobody who asks for any port, be it
// for a listener or for a connection, and to listeners, which share addresses, if they ask for it.
func ReservePort(tb testing.TB) string {
	tb.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(os.NewSyscallError("socket", err))
	}
	tb.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		tb.Fatal(os.NewSyscallError("setsockopt", err))
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		tb.Fatal(os.NewSyscallError("bind", err))
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		tb.Fatal(os.NewSyscallError("getsockname", err))
	}
	own, ok := name.(*unix.SockaddrInet4)
	if !ok {
		tb.Fatalf("the socket has the address %v", name)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(own.Port))
}
