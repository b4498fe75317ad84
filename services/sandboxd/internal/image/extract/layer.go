package extract

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"

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

	// paxXattr begins extended attributes in an archive.
	paxXattr = "SCHILY.xattr."
)

// layerRoot is the folder of a layer, as its thread sees it.
const layerRoot = "/"

// errBelow says that a layer cannot be written before those below it are there.
var errBelow = errors.New("the layer needs a file of those below")

// layer is a layer that is being written.
type layer struct {
	Target

	// overlay says that the root is the layer's own folder, in overlayfs's notation; else it is
	// the mounted whole.
	overlay bool
	// below are the layers below; nil if they are not known yet, or the root is the whole.
	below *below
	// own are the paths that the layer has itself, with all folders above them.
	own map[string]bool
	// hidden are the paths at which it shows nothing, or no folder, of what is below.
	hidden map[string]bool
	// marks are those of hidden where a note of it was made.
	marks map[string]bool
	// opaque are the folders that show nothing of what is below, bare says it of the root.
	opaque map[string]bool
	bare   bool
	// implied are the folders that were made on the way to an entry.
	implied map[string]bool
}

func (t Target) newLayer(overlay bool, b *below) *layer {
	return &layer{
		Target: t, overlay: overlay, below: b,
		own: map[string]bool{}, hidden: map[string]bool{}, marks: map[string]bool{}, opaque: map[string]bool{}, implied: map[string]bool{},
	}
}

// write writes a layer into a folder, which is the root of the thread that does it: wherever names
// and links lead, also a link that comes in the place of a folder while that is being written, the
// kernel keeps them inside. A layer of overlayfs has to be settled then.
func (l *layer) write(ctx context.Context, root string, r io.Reader) error {
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

// admit is called with each entry before its place is looked for. It drops what would be
// notes of overlayfs: a layer says in its own way what it hides, and the notes of others
// could show a container what is not of its image.
func (l *layer) admit(h *tar.Header) (bool, error) {
	maps.DeleteFunc(h.PAXRecords, func(key, _ string) bool {
		return strings.HasPrefix(key, paxXattr) && isNote(key[len(paxXattr):], l.notes())
	})
	if !ownerID(h.Uid) || !ownerID(h.Gid) {
		return false, fmt.Errorf("owner %d:%d of %q is out of range: %w", h.Uid, h.Gid, h.Name, errdefs.ErrDataLoss)
	}
	if err := l.ownable(h); err != nil {
		return false, unownableError{fmt.Errorf("owner %d:%d of %q: %w", h.Uid, h.Gid, h.Name, err)}
	}
	if h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0 {
		return false, nil
	}
	if h.Typeflag == tar.TypeCont || h.Typeflag == tar.TypeGNUSparse {
		h.Typeflag = tar.TypeReg // a file all the same; its holes are read as zeros
	}
	if h.Typeflag == tar.TypeLink && l.overlay {
		if err := l.reach(filepath.Join(layerRoot, h.Linkname)); err != nil { //nolint:gosec // as below
			return false, fmt.Errorf("hard link %q to %q: %w", h.Name, h.Linkname, err)
		}
	}
	return true, l.makeWay(filepath.Dir(filepath.Join(layerRoot, h.Name))) //nolint:gosec // an absolute path is cleaned of dots
}

// ownerID says whether a number can be a user or group. Another would be cut off to one that
// can, such as root.
func ownerID(id int) bool { return id >= 0 && id < math.MaxUint32 }

// ownable says whether the owner of an entry is in the namespace that the files belong to.
func (l *layer) ownable(h *tar.Header) error {
	if err := l.Own.CheckUIDs(uint32(h.Uid), 1); err != nil {
		return err
	}
	return l.Own.CheckGIDs(uint32(h.Gid), 1)
}

// unownableError is about an owner that the node lacks: not the layer is at fault.
type unownableError struct{ error }

// Kind returns the kind of the error, whatever its causes are elsewhere taken for.
func (unownableError) Kind() error { return errdefs.ErrFailedPrecondition }

// Unwrap returns the reason.
func (e unownableError) Unwrap() error { return e.error }

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
	l.imply(dir)
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
	delete(l.implied, path)
	if h.Typeflag == tar.TypeDir {
		return true, l.reveal(path)
	}
	l.disown(path)
	if l.overlay {
		l.hidden[path] = true
	}
	return true, nil
}

// imply notes a folder and those above it, unless the layer has them itself.
func (l *layer) imply(dir string) {
	for p := dir; l.overlay && p != layerRoot && !l.own[p] && !l.implied[p]; p = filepath.Dir(p) {
		l.implied[p] = true
	}
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
	if !l.overlay || !l.hidden[path] {
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

// makeOpaque hides what is below a folder.
func (l *layer) makeOpaque(dir string) error {
	l.opaque[dir] = true
	return unix.Setxattr(dir, l.notes()+noteOpaque, []byte{'y'}, 0)
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
	case !l.overlay:
		return os.RemoveAll(path)
	case exists && l.hidden[path]:
		return nil
	}
	l.hidden[path], l.marks[path] = true, true
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
	if l.overlay {
		if dir == layerRoot {
			l.bare = true // overlayfs takes no such note for a root
			return nil
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

// reach makes sure that there is something at a path that a hard link leads to. What is there
// only in a layer below is copied.
func (l *layer) reach(path string) error {
	fi, err := os.Lstat(path)
	switch {
	case err == nil && whiteout(fi):
		return fmt.Errorf("the layer hides it: %w", fs.ErrNotExist)
	case err == nil || !errors.Is(err, fs.ErrNotExist):
		return nil // what is wrong shows when it is linked
	case l.below == nil:
		return errBelow
	case l.covered(path):
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	l.imply(filepath.Dir(path))
	return l.below.copy(path)
}

// covered says that nothing shows at a path of what is below.
func (l *layer) covered(path string) bool {
	if l.bare {
		return true
	}
	for p := filepath.Dir(path); p != layerRoot; p = filepath.Dir(p) {
		if l.opaque[p] || l.hidden[p] {
			return true
		}
	}
	return false
}

// whiteout says that a file is overlayfs's note of nothing.
func whiteout(fi fs.FileInfo) bool {
	st, ok := fi.Sys().(*syscall.Stat_t)
	return ok && fi.Mode()&fs.ModeCharDevice != 0 && st.Rdev == 0
}
