package crilog

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// openSafe opens a log for appending and makes it if it does not exist, with its folders if
// that is asked for. Whatever is not a regular file is refused without being opened: a FIFO
// would block, a device could act, a link could lead anywhere.
func openSafe(at Place, folders bool) (*os.File, error) {
	folder, err := openFolder(at, folders)
	if err != nil {
		return nil, fmt.Errorf("log %s: %w: %s", at.Path, sentinelOf(err), err.Error())
	}
	defer unix.Close(folder)
	base := filepath.Base(at.Path)
	for {
		fd, err := unix.Openat(folder, base, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, logMode)
		if err == nil {
			f := os.NewFile(uintptr(fd), at.Path)
			// The mode is the same under every umask.
			return f, f.Chmod(logMode)
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("log %s: %w: %s", at.Path, sentinelOf(err), err.Error())
		}
		f, err := openExisting(folder, base, at.Path)
		if !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
	}
}

// openFolder opens the folder of a log, going down from the folder that is not to be left one
// name at a time, so that no link is followed, whoever makes one meanwhile.
func openFolder(at Place, missing bool) (int, error) {
	top := at.Dir
	if top == "" {
		top = filepath.Dir(at.Path)
	}
	rel, err := filepath.Rel(top, filepath.Dir(at.Path))
	if err != nil || !filepath.IsLocal(rel) {
		return 0, fmt.Errorf("not below %s: %w", top, unix.EINVAL)
	}
	if missing {
		if err := os.MkdirAll(top, 0o755); err != nil {
			return 0, err
		}
	}
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC
	fd, err := unix.Open(top, flags, 0)
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: top, Err: err}
	}
	if rel == "." {
		return fd, nil
	}
	for name := range strings.SplitSeq(rel, "/") {
		if missing {
			if err := unix.Mkdirat(fd, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
				return 0, errors.Join(&fs.PathError{Op: "mkdir", Path: name, Err: err}, unix.Close(fd))
			}
		}
		next, err := unix.Openat(fd, name, flags|unix.O_NOFOLLOW, 0)
		if err != nil {
			err = &fs.PathError{Op: "open", Path: name, Err: notFollowed(fd, name, err)}
		}
		if closeErr := unix.Close(fd); err != nil || closeErr != nil {
			return 0, errors.Join(err, closeErr)
		}
		fd = next
	}
	return fd, nil
}

// notFollowed tells a link apart from other things that are no folder.
func notFollowed(folder int, name string, err error) error {
	var st unix.Stat_t
	if unix.Fstatat(folder, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return unix.ELOOP
	}
	return err
}

// openExisting looks at what is in a folder before opening just that.
func openExisting(folder int, base, path string) (*os.File, error) {
	fd, err := unix.Openat(folder, base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
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
		return nil, fmt.Errorf("log %s: %w: %s", path, sentinelOf(err), err.Error())
	}
	return os.NewFile(uintptr(opened), path), nil
}

// sentinelOf is the kind of an error of the file system, as the caller of the runtime sees it.
func sentinelOf(err error) error {
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EISDIR), errors.Is(err, unix.EINVAL):
		return errdefs.ErrInvalidArgument
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EROFS):
		return errdefs.ErrFailedPrecondition
	case errors.Is(err, fs.ErrPermission):
		return errdefs.ErrPermissionDenied
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.EDQUOT):
		return errdefs.ErrResourceExhausted
	default:
		return errdefs.ErrInternal
	}
}
