package cadvisor

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

// Listen opens the socket for root alone. A socket that another process serves is left alone
// (ErrAlreadyExists). Closing the listener removes the socket unless its place has been taken
// by another one: containerd, when it starts, replaces whatever is there.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	lis, err := unixsock.Listen(ctx, unixsock.Config{Path: path})
	if errdefs.IsAlreadyExists(err) {
		return nil, fmt.Errorf("%w; cadvisor.socket is for nodes without containerd: stop what listens there, or unset the key", err)
	}
	if err != nil {
		return nil, err
	}
	unix, ok := lis.(*net.UnixListener)
	if !ok {
		return lis, nil
	}
	made, err := os.Lstat(path)
	if err != nil {
		unix.SetUnlinkOnClose(false)
		_ = unix.Close()
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return &listener{UnixListener: unix, path: path, made: made}, nil
}

// listener removes only the socket that it made.
type listener struct {
	*net.UnixListener

	path  string
	made  fs.FileInfo
	leave sync.Once
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.leave.Do(func() {
		there, err := os.Lstat(l.path)
		if err != nil || !os.SameFile(there, l.made) {
			l.SetUnlinkOnClose(false)
		}
	})
	return l.UnixListener.Close()
}
