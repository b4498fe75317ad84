// Package erofs is a snapshotter that keeps each layer of an image as one file, a read-only erofs
// file system, and shows it where the overlay snapshotter would have the layer's folder.
//
// The books are those of containerd's erofs snapshotter. That one names the file systems that must
// be mounted before an overlay, for a mount manager to put in; here each layer is mounted once, in
// its own folder of the snapshotter, for all that is on top of it, and what is told are mounts that
// any shim can do. So containers of one image share its pages in memory, and nothing is recorded
// that a crash or a reboot could make untrue: what is mounted is looked up, what is missing is mounted
// when it is asked for, and what nothing is on top of any more is unmounted by Cleanup.
package erofs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	mounterofs "github.com/containerd/containerd/v2/plugins/mount/erofs"
	snaperofs "github.com/containerd/containerd/v2/plugins/snapshots/erofs"
	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/extract"
)

// Program makes erofs file systems.
const Program = "mkfs.erofs"

// idLabel is the name of a layer's folder below that of the snapshots. The path is made of it anew,
// since the storage may be moved.
const idLabel = "crisp/erofs.id"

const (
	blobName = "layer.erofs" // as containerd's snapshotter has it
	newName  = "layer.new"
)

// Supported says what the node lacks for the snapshotter. Errors: ErrFailedPrecondition.
func Supported() error {
	if _, err := exec.LookPath(Program); err != nil {
		return fmt.Errorf("program %s is not in PATH, install erofs-utils: %w", Program, errdefs.ErrFailedPrecondition)
	}
	// The kernel loads the module if there is one. Whoever may not mount is not told.
	fd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("the kernel has no erofs, neither built in nor as a module: %w", errdefs.ErrFailedPrecondition)
	}
	if err == nil {
		_ = unix.Close(fd)
	}
	return nil
}

// Snapshotter is the snapshotter. It is safe for concurrent use.
type Snapshotter struct {
	snapshots.Snapshotter

	root    string
	handler mount.Handler

	mu sync.Mutex // mu guards the mounts of layers and the rest
	// round counts clean-ups; shown is the round in which a layer's folder was last asked for.
	round uint64
	shown map[string]uint64
	held  map[string]int // by how many a layer's folder is held
}

var (
	_ snapshots.Snapshotter = (*Snapshotter)(nil)
	_ snapshots.Cleaner     = (*Snapshotter)(nil)
)

// New opens or makes the snapshotter in a folder. Errors: those of [Supported].
func New(root string) (*Snapshotter, error) {
	if err := Supported(); err != nil {
		return nil, err
	}
	sn, err := snaperofs.NewSnapshotter(root, snaperofs.WithRemapIDs())
	if err != nil {
		return nil, err
	}
	return &Snapshotter{
		Snapshotter: sn, root: root, handler: mounterofs.NewErofsMountHandler(),
		shown: map[string]uint64{}, held: map[string]int{},
	}, nil
}

// Folder is where a layer shows, by the name of its folder below that of the snapshots.
func Folder(root, id string) string { return filepath.Join(root, "snapshots", id, "fs") }

// Blob is the file of a layer with this folder.
func Blob(folder string) string { return filepath.Join(filepath.Dir(folder), blobName) }

// Stat implements snapshots.Snapshotter. The folder of a layer is in its labels as that of the
// overlay snapshotter's are; it shows the layer only while it is held, see [Snapshotter.Hold].
func (s *Snapshotter) Stat(ctx context.Context, key string) (snapshots.Info, error) {
	info, err := s.Snapshotter.Stat(ctx, key)
	if id := info.Labels[idLabel]; err == nil && id != "" {
		info.Labels[extract.FolderLabel] = Folder(s.root, id)
	}
	return info, err
}

// Prepare implements snapshots.Snapshotter.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	mounts, err := s.Snapshotter.Prepare(ctx, key, parent, opts...)
	return s.made(ctx, key, mounts, err)
}

// View implements snapshots.Snapshotter.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	mounts, err := s.Snapshotter.View(ctx, key, parent, opts...)
	return s.made(ctx, key, mounts, err)
}

// made returns the mounts of a snapshot that was just made, which is taken back if there are none.
func (s *Snapshotter) made(ctx context.Context, key string, mounts []mount.Mount, err error) ([]mount.Mount, error) {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err // nothing was made
	}
	if err = lost(err); err == nil {
		mounts, err = s.plain(ctx, mounts)
	}
	if err != nil {
		return nil, errors.Join(err, s.Snapshotter.Remove(context.WithoutCancel(ctx), key))
	}
	return mounts, nil
}

// lost tells what to do about a layer whose file is not there.
func lost(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the file of a layer is gone, pull the image again: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}

// Mounts implements snapshots.Snapshotter. The layers below show when it returns.
func (s *Snapshotter) Mounts(ctx context.Context, key string) ([]mount.Mount, error) {
	mounts, err := s.Snapshotter.Mounts(ctx, key)
	if err != nil {
		return nil, lost(err)
	}
	return s.plain(ctx, mounts)
}

// plain makes one mount of a list of layers, the topmost first, and an overlay that is on top of them
// by their numbers; the layer alone, where it shows, of a single one.
func (s *Snapshotter) plain(ctx context.Context, mounts []mount.Mount) ([]mount.Mount, error) {
	var folders []string
	for _, m := range mounts {
		if m.Type == "erofs" {
			folders = append(folders, filepath.Join(filepath.Dir(m.Source), "fs"))
		}
	}
	last := mounts[len(mounts)-1]
	overlay := last.Type == "format/mkdir/overlay" && len(folders) == len(mounts)-1 && len(folders) > 0
	switch {
	case len(mounts) == 1 && last.Type == "bind":
		return mounts, nil
	case !overlay && (len(mounts) != 1 || len(folders) != 1):
		return nil, fmt.Errorf("%d mounts that end with type %q are not known: %w", len(mounts), last.Type, errdefs.ErrNotImplemented)
	}
	if err := s.show(ctx, folders); err != nil {
		return nil, err
	}
	if !overlay {
		return []mount.Mount{{Type: "bind", Source: folders[0], Options: []string{"ro", "rbind"}}}, nil
	}
	options := slices.DeleteFunc(slices.Clone(last.Options), func(o string) bool { return strings.HasPrefix(o, "lowerdir=") })
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: append(options, "lowerdir="+strings.Join(folders, ":"))}}, nil
}

// Hold shows layers in their folders until release is called.
func (s *Snapshotter) Hold(ctx context.Context, folders []string) (release func(), err error) {
	s.count(folders, 1)
	release = sync.OnceFunc(func() { s.count(folders, -1) })
	if err := s.show(ctx, folders); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

func (s *Snapshotter) count(folders []string, change int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range folders {
		if s.held[f] += change; s.held[f] == 0 {
			delete(s.held, f)
		}
	}
}

// show mounts those of layers that are not.
func (s *Snapshotter) show(ctx context.Context, folders []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range folders {
		mounted, err := mountinfo.Mounted(f)
		if err == nil && !mounted {
			err = s.mountLocked(ctx, f)
		}
		if err != nil {
			return fmt.Errorf("layer in %s: %w", filepath.Dir(f), err)
		}
		s.shown[f] = s.round
	}
	return nil
}

func (s *Snapshotter) mountLocked(ctx context.Context, folder string) error {
	if _, err := os.Lstat(Blob(folder)); err != nil {
		return lost(err)
	}
	// A process that was killed may have left the files that the layer was made of.
	if err := extract.Empty(folder); err != nil {
		return err
	}
	_, err := s.handler.Mount(ctx, mount.Mount{Type: "erofs", Source: Blob(folder), Options: []string{"ro", "loop"}}, folder, nil)
	return err
}

// Hide unmounts a layer, whoever uses it: who has it open or below an overlay keeps it.
func Hide(folder string) error { return mount.UnmountAll(folder, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) }

// Commit implements snapshots.Snapshotter. What is in the snapshot's folder, in overlayfs's notation,
// becomes a file system.
func (s *Snapshotter) Commit(ctx context.Context, name, key string, opts ...snapshots.Opt) error {
	mounts, err := s.Snapshotter.Mounts(ctx, key)
	if err != nil {
		return err
	}
	folder := ownFolder(mounts)
	if folder == "" {
		return fmt.Errorf("snapshot %q has no folder of its own: %w", key, errdefs.ErrFailedPrecondition)
	}
	if _, err := os.Lstat(Blob(folder)); errors.Is(err, fs.ErrNotExist) {
		err = pack(ctx, folder)
		if err != nil {
			return err
		}
	}
	labels := snapshots.WithLabels(map[string]string{idLabel: filepath.Base(filepath.Dir(folder))})
	if err := s.Snapshotter.Commit(ctx, name, key, append(slices.Clone(opts), labels)...); err != nil {
		return err
	}
	return extract.Empty(folder)
}

// ownFolder is the folder of an active snapshot.
func ownFolder(mounts []mount.Mount) string {
	last := mounts[len(mounts)-1]
	switch {
	case len(mounts) == 1 && last.Type == "bind":
		return last.Source
	case len(mounts) == 1 && last.Type == "erofs": // packed, and not committed
		return filepath.Join(filepath.Dir(last.Source), "fs")
	}
	for _, o := range last.Options {
		if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
			return dir
		}
	}
	return ""
}

// Renew makes the file of a layer anew of what write writes into its folder.
func (s *Snapshotter) Renew(ctx context.Context, folder string, write func() error) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	s.mu.Lock()
	err := Hide(folder)
	s.mu.Unlock()
	if err == nil {
		err = extract.Empty(folder)
	}
	if err == nil {
		err = write()
	}
	if err == nil {
		err = pack(ctx, folder)
	}
	return errors.Join(err, extract.Empty(folder))
}

// pack makes the file of a layer of what is in its folder.
func pack(ctx context.Context, folder string) error {
	dir := filepath.Dir(folder)
	to := filepath.Join(dir, newName)
	cmd := exec.CommandContext(ctx, Program, "--quiet", "-Enoinline_data", to, folder)
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return os.Rename(to, Blob(folder))
	}
	_ = os.Remove(to) // goes with the snapshot at the latest
	var kind error = errdefs.ErrInternal
	for _, full := range []error{unix.ENOSPC, unix.EDQUOT} {
		// Its text is that of C, ours begins with a small letter.
		if strings.Contains(string(out), full.Error()[1:]) {
			kind = full
		}
	}
	if ctx.Err() != nil {
		kind = context.Cause(ctx)
	}
	return fmt.Errorf("%s: %w: %s: %w", Program, err, strings.TrimSpace(string(out)), kind)
}

// Remove implements snapshots.Snapshotter.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	info, err := s.Stat(ctx, key)
	if folder := info.Labels[extract.FolderLabel]; err == nil && folder != "" {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.shown, folder)
		if err := Hide(folder); err != nil {
			return fmt.Errorf("unmount %s: %w", folder, err)
		}
	}
	return s.Snapshotter.Remove(ctx, key)
}

// Cleanup implements snapshots.Cleaner: it unmounts the layers that nothing is on top of.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	s.mu.Lock()
	s.round++
	round := s.round
	s.mu.Unlock()
	_, idle, err := Folders(ctx, s.root, s.Snapshotter)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, folder := range idle {
		// A snapshot that was made meanwhile has asked for its layers in this round.
		if s.held[folder] > 0 || s.shown[folder] == round {
			continue
		}
		delete(s.shown, folder)
		if err := Hide(folder); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", folder, err))
		}
	}
	return errors.Join(errs...)
}

// HideRest unmounts the layers that none of the snapshots that are needed is on top of, which a
// collection may not have come to. Nothing may use the snapshotter meanwhile.
func (s *Snapshotter) HideRest(ctx context.Context, needed Walker) error {
	keep, _, err := Folders(ctx, s.root, needed)
	if err != nil {
		return err
	}
	used, idle, err := Folders(ctx, s.root, s.Snapshotter)
	if err != nil {
		return err
	}
	var errs []error
	for _, folder := range slices.Concat(used, idle) {
		if slices.Contains(keep, folder) {
			continue
		}
		if err := Hide(folder); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", folder, err))
		}
	}
	return errors.Join(errs...)
}

// Walker lists snapshots.
type Walker interface {
	Walk(ctx context.Context, fn snapshots.WalkFunc, filters ...string) error
}

// Folders returns the folders of all layers: those that snapshots other than layers are on top of,
// and those that nothing is on top of.
func Folders(ctx context.Context, root string, w Walker) (used, idle []string, err error) {
	parents, folders := map[string]string{}, map[string]string{}
	var tops []string
	err = w.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Kind != snapshots.KindCommitted {
			tops = append(tops, info.Parent)
			return nil
		}
		parents[info.Name] = info.Parent
		if id := info.Labels[idLabel]; id != "" {
			folders[info.Name] = Folder(root, id)
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	for _, name := range tops {
		for ; folders[name] != ""; name = parents[name] {
			used = append(used, folders[name])
			delete(folders, name)
		}
	}
	return used, slices.Collect(maps.Values(folders)), nil
}
