package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// CheckLocation says whether an archive can be written to a path: absolute, not there, in a
// folder that is. Errors: ErrInvalidArgument, ErrAlreadyExists, ErrFailedPrecondition.
func CheckLocation(path string) error {
	if !filepath.IsAbs(path) || filepath.Clean(path) == "/" {
		return fmt.Errorf("location %q must be the absolute path of a file: %w", path, errdefs.ErrInvalidArgument)
	}
	_, err := os.Lstat(path)
	switch {
	case err == nil:
		return fmt.Errorf("location %s: %w", path, errdefs.ErrAlreadyExists)
	case !errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("location: %w: %w", errdefs.ErrFailedPrecondition, err)
	}
	f, err := nameless(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("location %s is not writable: %w: %w", path, errdefs.ErrFailedPrecondition, err)
	}
	return f.Close()
}

// nameless opens a file without a name in a folder: it is gone when nobody has it open.
func nameless(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// Archive writes the content of a folder as a tar archive, which appears at location whole
// or not at all, readable for the owner only. A killed process leaves nothing there.
// Errors: ErrAlreadyExists.
func Archive(ctx context.Context, dir, location string) error {
	f, err := nameless(filepath.Dir(location))
	if err != nil {
		return fmt.Errorf("archive %s: %w", location, err)
	}
	defer f.Close()
	err = archive.WriteDiff(ctx, f, "", dir)
	if err != nil {
		return fmt.Errorf("archive %s: %w", location, err)
	}
	err = f.Sync()
	if err != nil {
		return fmt.Errorf("archive %s: %w", location, err)
	}
	err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.AT_FDCWD, location, unix.AT_SYMLINK_FOLLOW)
	if errors.Is(err, syscall.EEXIST) {
		return fmt.Errorf("location %s: %w", location, errdefs.ErrAlreadyExists)
	}
	if err != nil {
		return fmt.Errorf("archive %s: %w", location, err)
	}
	return nil
}

// WriteTree copies a folder with owners, modes and attributes; one that is not there is
// left out.
func WriteTree(from, to string) error {
	_, err := os.Lstat(from)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return fs.CopyDir(to, from, fs.WithAllowXAttrErrors())
}

// TakeImages copies the CRIU images of a container out of a pod checkpoint into a folder
// that it makes, so that the checkpoint is neither changed nor needed any more.
// Errors: ErrFailedPrecondition for a checkpoint without them.
func TakeImages(ctx context.Context, checkpoint, name, to string) error {
	return withContainer(checkpoint, name, func(root *os.Root) error {
		sub, err := root.OpenRoot(filepath.Base(Images("")))
		if err != nil {
			return err
		}
		defer func() { _ = sub.Close() }() // only read
		err = os.MkdirAll(to, 0o700)
		if err != nil {
			return err
		}
		dir, err := sub.Open(".")
		if err != nil {
			return err
		}
		defer dir.Close()
		entries, err := dir.ReadDir(-1)
		if err != nil {
			return err
		}
		for _, entry := range entries {
			err := ctx.Err()
			if err == nil {
				err = copyFile(sub, entry.Name(), filepath.Join(to, entry.Name()))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// copyFile copies a regular file; CRIU writes nothing else that a restore needs.
func copyFile(root *os.Root, name, to string) error {
	st, err := root.Lstat(name)
	if err != nil || !st.Mode().IsRegular() {
		return err
	}
	src, err := root.Open(name)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}

// TakeVolumes copies the image's volumes of a container out of a pod checkpoint into a
// folder that is not there yet.
func TakeVolumes(checkpoint, name, to string) error {
	return withContainer(checkpoint, name, func(root *os.Root) error {
		st, err := root.Lstat(filepath.Base(Volumes("")))
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err == nil && !st.IsDir() {
			err = fmt.Errorf("volumes are not a folder: %w", errdefs.ErrFailedPrecondition)
		}
		if err != nil {
			return err
		}
		return fs.CopyDir(to, Volumes(Dir(checkpoint, name)), fs.WithAllowXAttrErrors())
	})
}

// RootfsChanges calls fn with the changes to a container's root file system in a pod
// checkpoint, a tar archive.
func RootfsChanges(checkpoint, name string, fn func(io.Reader) error) error {
	return withContainer(checkpoint, name, func(root *os.Root) error {
		f, err := root.Open(filepath.Base(RootfsDiff("")))
		if err != nil {
			return err
		}
		defer f.Close()
		return fn(f)
	})
}

func withContainer(checkpoint, name string, fn func(*os.Root) error) error {
	root, err := openRoot(checkpoint)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // only read
	sub, err := root.OpenRoot(filepath.Join(containers, name))
	if err == nil {
		defer func() { _ = sub.Close() }() // only read
		err = fn(sub)
	}
	if err != nil {
		return fmt.Errorf("container %q in checkpoint %s: %w", name, checkpoint, err)
	}
	return nil
}
