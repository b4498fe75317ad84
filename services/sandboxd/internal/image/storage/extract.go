package storage

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	"golang.org/x/sys/unix"
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
		l := newLayer(upper, lower)
		_, err := archive.Apply(ctx, upper, r, archive.WithParents(lower), archive.WithFilter(l.admit), archive.WithConvertWhiteout(l.convert))
		return err
	}
	return mount.WithTempMount(ctx, mounts, func(root string) error {
		l := newLayer(root, nil)
		_, err := archive.Apply(ctx, root, r, archive.WithFilter(l.admit), archive.WithConvertWhiteout(l.convert))
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

// layer is a layer that is being extracted.
type layer struct {
	root string
	// lower are the folders of the layers below, in overlayfs's notation; none if the root
	// is the mounted whole.
	lower []string
	// own are the paths that the layer has itself, with all folders above them.
	own map[string]bool
	// hidden are the paths at which it shows nothing, or no folder, of what is below.
	hidden map[string]bool
	// opaque are the folders that show nothing of what is below.
	opaque map[string]bool
}

func newLayer(root string, lower []string) *layer {
	return &layer{root: root, lower: lower, own: map[string]bool{}, hidden: map[string]bool{}, opaque: map[string]bool{}}
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
	if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
		return false, nil
	}
	return true, l.makeWay(filepath.Dir(filepath.Join("/", h.Name))) //nolint:gosec // an absolute path is cleaned of dots
}

// makeWay makes folders of what the layers below have, or this one hides, where the layer
// needs a folder. Behind a link it is left to whom the place is looked for by.
func (l *layer) makeWay(dir string) error {
	p := l.root
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
// is to be written. The place is inside of the root, and what the name of a whiteout stands
// for is in the same folder.
func (l *layer) convert(h *tar.Header, path string) (bool, error) {
	base, dir := filepath.Base(path), filepath.Dir(path)
	switch {
	case base == whiteoutOpaque:
		return false, l.hideBelow(dir)
	case strings.HasPrefix(base, whiteoutMeta):
		return false, nil
	case strings.HasPrefix(base, whiteoutPrefix):
		return false, l.hide(filepath.Join(dir, strings.TrimPrefix(base, whiteoutPrefix)), h)
	}
	for p := dir; len(p) > len(l.root) && !l.own[p]; p = filepath.Dir(p) {
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

// visibleBelow says whether the layers below show something at a path.
func (l *layer) visibleBelow(path string) bool {
	for p := path; len(p) > len(l.root); p = filepath.Dir(p) {
		if l.opaque[p] {
			return false
		}
	}
	rel, err := filepath.Rel(l.root, path)
	if err != nil {
		return false
	}
	for _, dir := range l.lower {
		st, err := lookIn(dir, rel)
		if err == nil {
			return st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0
		}
	}
	return false
}

// lookIn looks at a path in a layer without following links.
func lookIn(dir, path string) (st unix.Stat_t, err error) {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return st, err
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return st, err
	}
	defer unix.Close(fd)
	return st, unix.Fstat(fd, &st)
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
	case !l.visibleBelow(path):
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
		if dir == l.root {
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
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := l.hide(filepath.Join(l.root, e.Name()), &tar.Header{}); err != nil {
				return err
			}
		}
	}
	return nil
}
