package extract

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// below are the layers below another, in overlayfs's notation. It is used by one goroutine at a
// time.
type below struct {
	notes string     // see [Target]
	dirs  []*os.File // their folders, the topmost first
	seen  map[string]place
}

// place is what shows at a path of layers.
type place struct {
	// in are those of the layers that show, the topmost first: none if there is nothing, more
	// than one only of a folder.
	in []*os.File
	// st is what the topmost has there.
	st unix.Stat_t
}

func (p place) folder() bool { return len(p.in) > 0 && p.st.Mode&unix.S_IFMT == unix.S_IFDIR }

// openBelow opens the folders of layers, which cannot be reached by name any more when the one
// above is written. The caller owes a close.
func openBelow(dirs []string, notes string) (*below, error) {
	b := &below{notes: notes, seen: map[string]place{}}
	for _, dir := range dirs {
		f, err := os.Open(dir)
		if err != nil {
			b.close()
			return nil, err
		}
		b.dirs = append(b.dirs, f)
	}
	b.seen[layerRoot] = place{in: b.dirs, st: unix.Stat_t{Mode: unix.S_IFDIR}}
	return b, nil
}

func (b *below) close() {
	for _, f := range b.dirs {
		_ = f.Close() // only read from
	}
}

// at returns what the layers show at a path.
func (b *below) at(path string) (place, error) {
	if p, ok := b.seen[path]; ok {
		return p, nil
	}
	parent, err := b.at(filepath.Dir(path))
	if err != nil {
		return place{}, err
	}
	var found place
	if parent.folder() {
		if found, err = merge(parent.in, path, b.notes); err != nil {
			return place{}, fmt.Errorf("%s of the layers below: %w", path, err)
		}
	}
	b.seen[path] = found
	return found, nil
}

// merge puts together what layers have at a path whose folder they all show.
func merge(layers []*os.File, path, notes string) (found place, err error) {
	for _, dir := range layers {
		st, opaque, err := look(dir, path, notes)
		if missing(err) {
			continue
		}
		if err != nil {
			return place{}, err
		}
		isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
		if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 || len(found.in) > 0 && !isDir {
			break
		}
		if len(found.in) == 0 {
			found.st = st
		}
		found.in = append(found.in, dir)
		if !isDir || opaque {
			break
		}
	}
	return found, nil
}

// missing says of an error that there is nothing at a path.
func missing(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENAMETOOLONG)
}

// look tells what a layer has at a path, and of a folder whether it shows nothing of those below.
func look(dir *os.File, path, notes string) (st unix.Stat_t, opaque bool, err error) {
	fd, err := lookIn(dir, path, unix.O_PATH)
	if err != nil {
		return st, false, err
	}
	err = unix.Fstat(fd, &st)
	_ = unix.Close(fd)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return st, false, err
	}
	if fd, err = lookIn(dir, path, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
		return st, false, err
	}
	defer unix.Close(fd)
	var note [8]byte
	n, err := unix.Fgetxattr(fd, notes+noteOpaque, note[:])
	return st, err == nil && n == 1 && note[0] == 'y', nil
}

// lookIn opens a path of a folder without following any link.
func lookIn(dir *os.File, path string, flags uint64) (fd int, err error) {
	path = strings.TrimPrefix(path, layerRoot)
	if path == "" {
		path = "."
	}
	return unix.Openat2(int(dir.Fd()), path, &unix.OpenHow{
		Flags: flags | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
}

// copy copies a file or link to the same path of the thread's root, as overlayfs does before one
// is linked. Nothing is copied if there is none.
func (b *below) copy(path string) error {
	p, err := b.at(path)
	if err != nil || len(p.in) == 0 {
		return err
	}
	switch p.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return copyFile(p.in[0], p.st, path, b.notes)
	case unix.S_IFLNK:
		return copyLink(p.in[0], p.st, path)
	}
	return nil
}

func copyFile(dir *os.File, st unix.Stat_t, path, notes string) (err error) {
	fd, err := lookIn(dir, path, unix.O_RDONLY)
	if err != nil {
		return err
	}
	from := os.NewFile(uintptr(fd), path)
	defer from.Close()
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	if err := copyAttributes(fd, st, int(to.Fd()), notes); err != nil {
		return err
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}

func copyLink(dir *os.File, st unix.Stat_t, path string) error {
	fd, err := lookIn(dir, path, unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(fd, "", target)
	if err == nil {
		err = os.Symlink(string(target[:n]), path)
	}
	if err == nil {
		err = os.Lchown(path, int(st.Uid), int(st.Gid))
	}
	return err
}

// copyAttributes gives a file or folder the owner, mode and extended attributes of another, but not
// the notes of overlayfs.
func copyAttributes(from int, st unix.Stat_t, to int, notes string) error {
	if err := unix.Fchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(to, st.Mode&0o7777); err != nil {
		return err
	}
	const most = 64 << 10 // the kernel's limit for the names and for a value
	names, value := make([]byte, most), make([]byte, most)
	n, err := unix.Flistxattr(from, names)
	if errors.Is(err, unix.ENOTSUP) {
		return nil
	}
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if name == "" || strings.HasPrefix(name, "trusted.") || isNote(name, notes) {
			continue
		}
		n, err := unix.Fgetxattr(from, name, value)
		if err == nil {
			err = unix.Fsetxattr(to, name, value[:n], 0)
		}
		if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.ENODATA) {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
