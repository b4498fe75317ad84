package crispshim

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"

	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/brief"
)

// logFIFO is where a shim logs, in its bundle. The runtime reads it.
const logFIFO = "log"

// openLog opens the log. What the Go runtime says when it dies goes there too.
func openLog(debug bool) (*slog.Logger, error) {
	// Opened for both directions, so that it opens without a reader and the end of a reader
	// is no broken pipe; without blocking, so that a full pipe holds nobody up.
	fd, err := unix.Open(logFIFO, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		// Nobody reads; the standard error is the start command's.
		fd, err := unix.Open(os.DevNull, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = errors.Join(unix.Dup2(fd, int(os.Stderr.Fd())), unix.Close(fd))
		}
		return slog.New(slog.DiscardHandler), err
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: logFIFO, Err: err}
	}
	if err := unix.Dup2(fd, int(os.Stderr.Fd())); err != nil {
		return nil, fmt.Errorf("log: %w", err)
	}
	level := slog.LevelInfo
	if debug {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(dropping(fd), &slog.HandlerOptions{Level: level, ReplaceAttr: lowerLevel})), nil
}

// lowerLevel writes levels as the readers of shims' logs expect them.
func lowerLevel(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == slog.LevelKey {
		return slog.String(slog.LevelKey, strings.ToLower(a.Value.String()))
	}
	return a
}

// dropping writes to a descriptor and drops what does not fit.
type dropping int

// Write implements io.Writer. It never fails: nobody could be told.
func (d dropping) Write(p []byte) (int, error) {
	_, _ = unix.Write(int(d), p)
	return len(p), nil
}

// toStatus gives an error its code on the wire. What an OCI runtime wrote may be any text.
func toStatus(err error) error { return brief.Status(errgrpc.ToGRPC(err)) }
