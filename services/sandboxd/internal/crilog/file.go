package crilog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const logMode = 0o640

// File is the log of one container, which both of its streams write to. A write that
// fails loses its records, and no more: the next one is tried anew. It is safe for
// concurrent use.
type File struct {
	path    string
	log     *slog.Logger
	dropped *atomic.Uint64

	// mu guards the rest and keeps the records of the streams apart.
	mu      sync.Mutex
	file    *os.File
	failing bool
}

// Open opens the log at a path for appending; with an empty one everything is thrown away.
// Bytes of records that could not be written are added to dropped. It fails with
// ErrInvalidArgument if there is something else than a regular file.
func Open(path string, log *slog.Logger, dropped *atomic.Uint64) (*File, error) {
	l := &File{path: path, log: log, dropped: dropped}
	if path == "" {
		return l, nil
	}
	f, err := openSafe(path)
	if err != nil {
		return nil, err
	}
	l.file = f
	return l, nil
}

// Path is the path of the log.
func (l *File) Path() string { return l.path }

// Write writes whole records with one call.
func (l *File) Write(ctx context.Context, records []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil || len(records) == 0 {
		return
	}
	n, err := l.file.Write(records)
	if err == nil {
		if l.failing {
			l.failing = false
			l.log.InfoContext(ctx, "container log is written again", slog.String("path", l.path))
		}
		return
	}
	l.dropped.Add(uint64(len(records)))
	if n > 0 {
		l.takeBack(int64(n))
	}
	if !l.failing {
		l.failing = true
		l.log.ErrorContext(ctx, "container log is not written",
			slog.String("path", l.path), slog.String("error", err.Error()))
	}
}

// takeBack removes the torn end of a write that was cut short.
func (l *File) takeBack(n int64) {
	if st, err := l.file.Stat(); err == nil && st.Size() >= n {
		_ = l.file.Truncate(st.Size() - n)
	}
}

// Reopen opens the path anew and writes there from now on. If that fails, writing goes on
// where it was.
func (l *File) Reopen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.path == "" {
		return nil
	}
	if l.file == nil {
		return fmt.Errorf("log %s is closed: %w", l.path, errdefs.ErrFailedPrecondition)
	}
	f, err := openSafe(l.path)
	if err != nil {
		return err
	}
	old := l.file
	l.file = f
	return old.Close()
}

// Close ends the writing.
func (l *File) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		return nil
	}
	f := l.file
	l.file = nil
	return f.Close()
}

// openSafe opens a log for appending and makes it if it does not exist. Whatever is not a
// regular file is refused without being opened: a FIFO would block, a device could act, a
// link could lead anywhere.
func openSafe(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, logMode)
		if err == nil {
			// The mode is the same under every umask.
			return f, f.Chmod(logMode)
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("log: %w: %w", err, sentinelOf(err))
		}
		f, err = openExisting(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
	}
}

// openExisting looks at what is at a path before opening just that.
func openExisting(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("log %s is not a regular file: %w", path, errdefs.ErrInvalidArgument)
	}
	opened, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("log %s: %w: %w", path, err, sentinelOf(err))
	}
	return os.NewFile(uintptr(opened), path), nil
}

// sentinelOf is the kind of an error of the file system, as the caller of the runtime sees it.
func sentinelOf(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return errdefs.ErrFailedPrecondition
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EISDIR), errors.Is(err, unix.EINVAL):
		return errdefs.ErrInvalidArgument
	case errors.Is(err, fs.ErrPermission):
		return errdefs.ErrPermissionDenied
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return errdefs.ErrResourceExhausted
	default:
		return errdefs.ErrInternal
	}
}
