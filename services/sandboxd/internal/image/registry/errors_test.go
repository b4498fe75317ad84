package registry

import (
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
)

// What the kernel refuses on a disk is not taken for trouble with the registry.
func TestOnlyTheNetworkIsUnavailable(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{&url.Error{Op: "Get", URL: "http://x", Err: &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}}, true},
		{&net.DNSError{Name: "x"}, true},
		{syscall.ECONNREFUSED, true},
		{io.ErrUnexpectedEOF, true},
		{&fs.PathError{Op: "open", Path: "/x", Err: syscall.EROFS}, false},
		{&os.LinkError{Op: "link", Old: "/d", New: "/h", Err: syscall.EPERM}, false},
		{&fs.PathError{Op: "write", Path: "/x", Err: syscall.EIO}, false},
		{&fs.PathError{Op: "open", Path: "/x", Err: syscall.EMFILE}, false},
	} {
		if got := errdefs.IsUnavailable(Classify(tt.err)); got != tt.want {
			t.Errorf("%v is unavailable: %t, want %t", tt.err, got, tt.want)
		}
	}
}
