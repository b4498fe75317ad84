// Package unixsock listens on unix sockets of the file system and tells who is at the
// other end of a connection.
//
// A socket is never open to more users than configured, not even between its creation
// and the setting of its mode. A socket left behind by a dead process is replaced, one
// that is served by a living process is not. Closing a listener removes the socket that
// it made and no other one that has taken its place. A socket passed by the service
// manager is taken over as it is.
package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// maxPath is the longest path that fits into a socket address.
	maxPath       = 107
	probeTimeout  = time.Second
	firstPassedFD = 3
	defaultMode   = 0o600
)

// Mode is the set of permission bits of a socket, written in octal as a string
// ("0660") in the configuration.
type Mode uint32

// MarshalText implements encoding.TextMarshaler.
func (m Mode) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%04o", uint32(m)), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *Mode) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 8, 32)
	if err != nil || v > 0o777 {
		return fmt.Errorf("%q is no file mode, write for example \"0660\"", text)
	}
	*m = Mode(v)
	return nil
}

// Config describes one listening socket.
type Config struct {
	// Path is the absolute path of the socket.
	Path string `toml:"path" comment:"Path of the socket."`
	// Mode are its permission bits; zero means 0600.
	Mode Mode `toml:"mode" comment:"Permission bits in octal. Who may write to the socket may connect."`
	// Owner and Group are names or numbers; empty leaves what the process creates.
	Owner string `toml:"owner" comment:"User (name or number) that owns the socket; empty: the user of the process."`
	Group string `toml:"group" comment:"Group (name or number) of the socket; empty: the group of the process."`
}

// Validate implements config.Validator.
func (c Config) Validate() error {
	var errs []error
	if !filepath.IsAbs(c.Path) {
		errs = append(errs, fmt.Errorf("path: %q is not absolute, write for example \"/run/crisp/x.sock\"", c.Path))
	}
	if len(c.Path) > maxPath {
		errs = append(errs, fmt.Errorf("path: %d bytes are too long for a unix socket, at most %d fit", len(c.Path), maxPath))
	}
	return errors.Join(errs...)
}

// Listen opens the socket. Missing parent folders are made (mode 0755). If the service
// manager passed a socket under the file name of cfg.Path (FileDescriptorName=), that
// one is used and nothing is changed on disk. A path that another process serves gives
// errdefs.ErrAlreadyExists, a path that is something else than a socket gives
// errdefs.ErrFailedPrecondition. Closing the listener removes the socket, unless
// another one has taken its place meanwhile: some programs replace whatever is there.
func Listen(ctx context.Context, cfg Config) (net.Listener, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("socket: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	passed, err := fromServiceManager(filepath.Base(cfg.Path))
	if passed != nil || err != nil {
		return passed, err
	}

	if err := os.MkdirAll(filepath.Dir(cfg.Path), 0o755); err != nil {
		return nil, fmt.Errorf("socket %s: %w", cfg.Path, err)
	}
	if err := removeStale(ctx, cfg.Path); err != nil {
		return nil, err
	}
	lc := net.ListenConfig{Control: closedToAll}
	lis, err := lc.Listen(ctx, "unix", cfg.Path)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", cfg.Path, err)
	}
	mode := fs.FileMode(cfg.Mode)
	if mode == 0 {
		mode = defaultMode
	}
	if err := SetAccess(cfg.Path, cfg.Owner, cfg.Group, mode); err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", cfg.Path, err), lis.Close())
	}
	return own(lis, cfg.Path)
}

// own returns a listener that removes only the socket that it made.
func own(lis net.Listener, path string) (net.Listener, error) {
	socket, ok := lis.(*net.UnixListener)
	if !ok {
		return lis, nil
	}
	made, err := os.Lstat(path)
	if err != nil {
		socket.SetUnlinkOnClose(false) // not ours any more
		return nil, errors.Join(fmt.Errorf("socket %s: %w", path, err), socket.Close())
	}
	return &listener{UnixListener: socket, path: path, made: made}, nil
}

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

// lostPoll is how often the file of a socket is looked at.
const lostPoll = time.Second

// Lost returns true when the file of a listener's socket is gone, or another has taken its
// place, so that nobody can connect any more; and false when ctx has ended. What the service
// manager has passed is its own business and never lost.
func Lost(ctx context.Context, lis net.Listener) bool {
	l, made := lis.(*listener)
	if !made {
		<-ctx.Done()
		return false
	}
	poll := time.NewTicker(lostPoll)
	defer poll.Stop()
	for {
		select {
		case <-poll.C:
		case <-ctx.Done():
			return false
		}
		there, err := os.Lstat(l.path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(there, l.made) {
			return true
		}
	}
}

// closedToAll sets the mode of the socket before it is bound: the file that bind makes
// inherits it, so nobody can connect before SetAccess has opened the door.
func closedToAll(_, _ string, c syscall.RawConn) error {
	var chmodErr error
	err := c.Control(func(fd uintptr) { chmodErr = unix.Fchmod(int(fd), defaultMode) })
	return errors.Join(err, chmodErr)
}

func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("socket %s: the path is not a socket: %w", path, errdefs.ErrFailedPrecondition)
	}
	dialer := net.Dialer{Timeout: probeTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(
			fmt.Errorf("socket %s: another process listens there: %w", path, errdefs.ErrAlreadyExists), conn.Close())
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	return nil
}

// SetAccess gives the file at path to owner and group (names or numbers, empty leaves
// them) and then sets its mode. It serves sockets and the secrets next to them.
func SetAccess(path, owner, group string, mode fs.FileMode) error {
	uid, err := lookup(owner, userID)
	if err != nil {
		return fmt.Errorf("owner %q: %w", owner, err)
	}
	gid, err := lookup(group, groupID)
	if err != nil {
		return fmt.Errorf("group %q: %w", group, err)
	}
	if uid >= 0 || gid >= 0 {
		if err := os.Chown(path, uid, gid); err != nil {
			return err
		}
	}
	return os.Chmod(path, mode)
}

// lookup returns the number of a user or group, -1 for the empty name.
func lookup(name string, byName func(string) (string, error)) (int, error) {
	if name == "" {
		return -1, nil
	}
	if n, err := strconv.Atoi(name); err == nil && n >= 0 {
		return n, nil
	}
	id, err := byName(name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(id)
}

func userID(name string) (string, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return "", err
	}
	return u.Uid, nil
}

func groupID(name string) (string, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		return "", err
	}
	return g.Gid, nil
}

// fromServiceManager returns the passed socket of that name, nil if there is none. Only
// the descriptor that matches is touched; the others belong to other callers.
func fromServiceManager(name string) (net.Listener, error) {
	if os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	names := strings.Split(os.Getenv("LISTEN_FDNAMES"), ":")
	if os.Getenv("LISTEN_FDS") != strconv.Itoa(len(names)) {
		return nil, nil // the sockets have no names, so none of them is meant
	}
	for i := range names {
		if names[i] != name {
			continue
		}
		fd := firstPassedFD + i
		unix.CloseOnExec(fd)
		file := os.NewFile(uintptr(fd), name)
		lis, err := net.FileListener(file)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("socket %s passed by the service manager: %w", name, err), file.Close())
		}
		return lis, file.Close()
	}
	return nil, nil
}
