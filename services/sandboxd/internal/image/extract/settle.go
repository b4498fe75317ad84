package extract

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// settle finishes a layer of overlayfs in its folder, when those below it are there.
func (l *layer) settle(folder string, b *below) error {
	root, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer root.Close()
	if l.bare {
		if err := l.hideAll(root, b); err != nil {
			return err
		}
	}
	for path := range l.marks {
		shows, err := l.shows(b, path)
		if err == nil && !shows {
			err = unmark(root, path)
		}
		if err != nil {
			return fmt.Errorf("whiteout of %s: %w", path, err)
		}
	}
	for path := range l.implied {
		if err := l.adopt(root, b, path); err != nil {
			return fmt.Errorf("attributes of %s: %w", path, err)
		}
	}
	return nil
}

// hideAll hides everything below the layer.
func (l *layer) hideAll(root *os.File, b *below) error {
	for _, dir := range b.dirs {
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
		names, err := dir.Readdirnames(-1)
		if err != nil {
			return err
		}
		for _, name := range names {
			if p, err := b.at(layerRoot + name); err != nil || len(p.in) == 0 {
				if err != nil {
					return err
				}
				continue
			}
			if err := l.cover(root, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// cover hides what is at a name in the root below the layer.
func (l *layer) cover(root *os.File, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(root.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return unix.Mknodat(int(root.Fd()), name, unix.S_IFCHR, 0)
	case err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return err
	}
	fd, err := lookIn(root, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	l.opaque[layerRoot+name] = true
	return unix.Fsetxattr(fd, l.notes()+noteOpaque, []byte{'y'}, 0)
}

// shows says whether something shows at a path of what is below, if the layer has nothing there.
func (l *layer) shows(b *below, path string) (bool, error) {
	for p := filepath.Dir(path); p != layerRoot; p = filepath.Dir(p) {
		if l.opaque[p] {
			return false, nil
		}
	}
	found, err := b.at(path)
	return len(found.in) > 0, err
}

// unmark takes back a whiteout. Overlayfs would list one of nothing where it puts no folders
// together. The folder looks as if it had never been there.
func unmark(root *os.File, path string) error {
	fd, err := lookIn(root, filepath.Dir(path), unix.O_RDONLY|unix.O_DIRECTORY)
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st, dir unix.Stat_t
	name := filepath.Base(path)
	switch err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case missing(err), err == nil && (st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0):
		return nil
	case err != nil:
		return err
	}
	if err := unix.Fstat(fd, &dir); err != nil {
		return err
	}
	if err := unix.Unlinkat(fd, name, 0); err != nil {
		return err
	}
	return unix.UtimesNanoAt(fd, ".", []unix.Timespec{dir.Atim, dir.Mtim}, 0)
}

// adopt gives a folder the attributes by which the layers below show it.
func (l *layer) adopt(root *os.File, b *below, path string) error {
	if shows, err := l.shows(b, path); err != nil || !shows || l.opaque[path] {
		return err
	}
	p, err := b.at(path)
	if err != nil || !p.folder() {
		return err
	}
	to, err := lookIn(root, path, unix.O_RDONLY|unix.O_DIRECTORY)
	if missing(err) {
		return nil // replaced or hidden later
	}
	if err != nil {
		return err
	}
	defer unix.Close(to)
	from, err := lookIn(p.in[0], path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	return copyAttributes(from, p.st, to, b.notes)
}

// TakeOwner gives a layer's folder the owner that the one below has, as a snapshot on top of it
// gets.
func TakeOwner(folder string, lower []string) error {
	if len(lower) == 0 {
		return nil
	}
	fi, err := os.Stat(lower[0])
	if err != nil {
		return err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	return os.Lchown(folder, int(st.Uid), int(st.Gid))
}

// Empty removes what is in a folder.
func Empty(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(folder, e.Name())))
	}
	return err
}
