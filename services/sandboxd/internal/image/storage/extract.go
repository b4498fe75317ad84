package storage

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
)

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	// whiteoutMeta begins the names of a union file system's own files.
	whiteoutMeta = ".wh..wh."

	xattrOpaque = "trusted.overlay.opaque"
	// paxOverlay begins the attributes by which overlayfs keeps its own notes.
	paxOverlay = "SCHILY.xattr.trusted.overlay."
)

// extract writes a layer into a snapshot. With overlayfs it goes into the layer's own folder,
// in overlayfs's notation; else into the mounted whole. Either way the result is the same:
// a whiteout hides what is below the layer and nothing that the layer has itself, wherever
// in the archive it stands.
func extract(ctx context.Context, mounts []mount.Mount, r io.Reader) error {
	if upper, lower, ok := overlayFolders(mounts); ok {
		return extractInto(ctx, upper, lower, r)
	}
	return mount.WithTempMount(ctx, mounts, func(root string) error {
		return extractInto(ctx, root, nil, r)
	})
}

// extractInto writes a layer into a folder, which is the root of the thread that does it:
// wherever names and links lead, also a link that comes in the place of a folder while that
// is being written, the kernel keeps them inside.
func extractInto(ctx context.Context, root string, lower []string, r io.Reader) (err error) {
	l, err := newLayer(lower)
	if err != nil {
		return err
	}
	defer l.close()
	return namespaces.OnThread(func() error {
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Chroot(root)
		}
		if err == nil {
			err = unix.Chdir(layerRoot)
		}
		if err != nil {
			return fmt.Errorf("enter the folder %s of a layer: %w", root, err)
		}
		_, err = archive.Apply(ctx, layerRoot, r, archive.WithFilter(l.admit), archive.WithConvertWhiteout(l.convert))
		return err
	})
}

// overlayFolders are a layer's own folder and those below it, the topmost first.
func overlayFolders(mounts []mount.Mount) (upper string, lower []string, ok bool) {
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		return "", nil, false
	}
	for _, o := range mounts[0].Options {
		if dir, found := strings.CutPrefix(o, "upperdir="); found {
			upper = dir
		} else if dirs, found := strings.CutPrefix(o, "lowerdir="); found {
			lower = strings.Split(dirs, ":")
		}
	}
	return upper, lower, upper != ""
}

// layerRoot is the folder of a layer, as its thread sees it.
const layerRoot = "/"

// layer is a layer that is being extracted.
type layer struct {
	// lower are the folders of the layers below, in overlayfs's notation, the topmost first;
	// none if the root is the mounted whole.
	lower []*os.File
	// own are the paths that the layer has itself, with all folders above them.
	own map[string]bool
	// hidden are the paths at which it shows nothing, or no folder, of what is below.
	hidden map[string]bool
	// opaque are the folders that show nothing of what is below.
	opaque map[string]bool
	// adopted are the folders with the attributes that they have below.
	adopted map[string]bool
}

// newLayer opens the folders below, which cannot be reached by name any more when the layer is
// extracted.
func newLayer(lower []string) (*layer, error) {
	l := &layer{own: map[string]bool{}, hidden: map[string]bool{}, opaque: map[string]bool{}, adopted: map[string]bool{}}
	for _, dir := range lower {
		f, err := os.Open(dir)
		if err != nil {
			l.close()
			return nil, err
		}
		l.lower = append(l.lower, f)
	}
	return l, nil
}

func (l *layer) close() {
	for _, f := range l.lower {
		_ = f.Close() // only read from
	}
}

func (l *layer) overlay() bool { return len(l.lower) > 0 }

// admit is called with each entry before its place is looked for. It drops what would be
// notes of overlayfs: a layer says in its own way what it hides, and the notes of others
// could show a container what is not of its image.
func (l *layer) admit(h *tar.Header) (bool, error) {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, paxOverlay) {
			delete(h.PAXRecords, key)
		}
	}
	if !ownerID(h.Uid) || !ownerID(h.Gid) {
		return false, fmt.Errorf("owner %d:%d of %q is out of range: %w", h.Uid, h.Gid, h.Name, errdefs.ErrDataLoss)
	}
	if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
		return false, nil
	}
	return true, l.makeWay(filepath.Dir(filepath.Join("/", h.Name))) //nolint:gosec // an absolute path is cleaned of dots
}

// ownerID says whether a number can be a user or group. Another would be cut off to one that
// can, such as root.
func ownerID(id int) bool { return id >= 0 && id < math.MaxUint32 }

// makeWay makes folders of what the layers below have, or this one hides, where the layer
// needs a folder. Behind a link it is left to whom the place is looked for by.
func (l *layer) makeWay(dir string) error {
	p := layerRoot
	for name := range strings.SplitSeq(strings.Trim(dir, "/"), "/") {
		if p = filepath.Join(p, name); l.own[p] {
			continue
		}
		fi, err := os.Lstat(p)
		switch {
		case err != nil || fi.Mode()&fs.ModeSymlink != 0:
			return nil // what is wrong with it shows when it is made
		case l.hidden[p]:
			err = l.reveal(p)
		case !fi.IsDir():
			err = os.Remove(p)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// convert is called with each entry and its place before it is written, and says whether it
// is to be written. The folder of the place is there, and what the name of a whiteout stands
// for is in the same folder.
func (l *layer) convert(h *tar.Header, path string) (bool, error) {
	base, dir := filepath.Base(path), filepath.Dir(path)
	if err := l.adopt(dir); err != nil {
		return false, err
	}
	switch {
	case base == whiteoutOpaque:
		return false, l.hideBelow(dir)
	case strings.HasPrefix(base, whiteoutMeta):
		return false, nil
	case strings.HasPrefix(base, whiteoutPrefix):
		name := strings.TrimPrefix(base, whiteoutPrefix)
		if name == "" || name == "." || name == ".." {
			return false, fmt.Errorf("whiteout %q of nothing: %w", h.Name, errdefs.ErrDataLoss)
		}
		return false, l.hide(filepath.Join(dir, name), h)
	}
	for p := dir; p != layerRoot && !l.own[p]; p = filepath.Dir(p) {
		l.own[p] = true
	}
	l.own[path] = true
	if h.Typeflag == tar.TypeDir {
		return true, l.reveal(path)
	}
	l.disown(path)
	if l.overlay() {
		l.hidden[path] = true
	}
	return true, nil
}

// disown forgets what was below a path that an entry replaces.
func (l *layer) disown(path string) {
	if fi, err := os.Lstat(path); err != nil || !fi.IsDir() {
		return
	}
	for p := range l.own {
		if strings.HasPrefix(p, path+"/") {
			delete(l.own, p)
		}
	}
}

// reveal prepares a folder in place of something that the layer hides: what was there before
// stays hidden.
func (l *layer) reveal(path string) error {
	if !l.overlay() || !l.hidden[path] {
		return nil
	}
	delete(l.hidden, path)
	if fi, err := os.Lstat(path); err == nil && !fi.IsDir() {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return l.makeOpaque(path)
}

// makeOpaque hides what is below a folder. Whiteouts in it go: overlayfs would list them,
// since it looks for them only where it puts folders together.
func (l *layer) makeOpaque(dir string) error {
	for p := range l.hidden {
		if !l.own[p] && strings.HasPrefix(p, dir+"/") {
			if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			delete(l.hidden, p)
		}
	}
	l.opaque[dir] = true
	return unix.Setxattr(dir, xattrOpaque, []byte{'y'}, 0)
}

// adopt gives a folder and those above it, which were made on the way to an entry of the layer,
// the attributes by which the layers below show them.
func (l *layer) adopt(dir string) error {
	for p := dir; p != layerRoot && !l.own[p] && !l.adopted[p]; p = filepath.Dir(p) {
		l.adopted[p] = true
		in, st := l.below(p)
		if in == nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		fd, err := lookIn(in, p, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return fmt.Errorf("attributes of %s: %w", p, err)
		}
		err = copyAttributes(fd, st, p)
		_ = unix.Close(fd)
		if err != nil {
			return fmt.Errorf("attributes of %s: %w", p, err)
		}
	}
	return nil
}

// copyAttributes gives a folder the owner, mode and extended attributes of another.
func copyAttributes(from int, st unix.Stat_t, to string) error {
	if err := os.Lchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(to, st.Mode&0o7777); err != nil {
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
		if name == "" || strings.HasPrefix(name, "trusted.") {
			continue
		}
		n, err := unix.Fgetxattr(from, name, value)
		if err == nil {
			err = unix.Lsetxattr(to, name, value[:n], 0)
		}
		if err != nil && !errors.Is(err, unix.ENOTSUP) && !errors.Is(err, unix.ENODATA) {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// below looks for what the layers below show at a path, and tells the layer; nil if nothing.
func (l *layer) below(path string) (in *os.File, st unix.Stat_t) {
	for p := path; p != layerRoot; p = filepath.Dir(p) {
		if l.opaque[p] {
			return nil, st
		}
	}
	for _, dir := range l.lower {
		fd, err := lookIn(dir, path, unix.O_PATH)
		if err != nil {
			continue
		}
		err = unix.Fstat(fd, &st)
		_ = unix.Close(fd)
		if err == nil {
			if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
				return nil, st // a whiteout
			}
			return dir, st
		}
	}
	return nil, st
}

// lookIn opens a path of a layer without following a link there.
func lookIn(dir *os.File, path string, flags uint64) (fd int, err error) {
	return unix.Openat2(int(dir.Fd()), strings.TrimPrefix(path, layerRoot), &unix.OpenHow{
		Flags: flags | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
	})
}

// hide hides what is at a path below the layer.
func (l *layer) hide(path string, h *tar.Header) error {
	fi, err := os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	exists := err == nil
	switch {
	case l.own[path] && exists && fi.IsDir():
		return l.hideBelow(path)
	case l.own[path] && exists:
		return nil
	case !l.overlay():
		return os.RemoveAll(path)
	case exists && l.hidden[path]:
		return nil
	}
	if in, _ := l.below(path); in == nil {
		return os.RemoveAll(path)
	}
	l.hidden[path] = true
	if exists {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	if err := unix.Mknod(path, unix.S_IFCHR, 0); err != nil {
		return err
	}
	return os.Lchown(path, h.Uid, h.Gid)
}

// hideBelow hides what is in a folder below the layer.
func (l *layer) hideBelow(dir string) error {
	if l.overlay() {
		if dir == layerRoot {
			return l.hideRoot()
		}
		return l.makeOpaque(dir)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case !l.own[path]:
			err = os.RemoveAll(path)
		case e.IsDir():
			err = l.hideBelow(path)
		default:
			err = nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// hideRoot hides everything below the layer. Overlayfs takes no such note for a root.
func (l *layer) hideRoot() error {
	for _, dir := range l.lower {
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
		entries, err := dir.ReadDir(-1)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := l.hide(filepath.Join(layerRoot, e.Name()), &tar.Header{}); err != nil {
				return err
			}
		}
	}
	return nil
}
