// Package storage holds what images and container layers are made of on disk: blobs, the
// snapshots they are unpacked into, and the database that knows which of them are needed.
//
// It promises that a name in the database never outlives a power loss without the data it
// stands for (see [Storage.Sync]), that what nothing refers to is removed again, and that of
// what an interrupted pull left behind only blobs, whole or begun, are there when the storage
// is used, and those for a limited time. A Storage is safe for concurrent use. It does not know registries, references or the container runtime
// interface.
package storage

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/metadata/boltutil"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	snapshotdb "github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/containerd/v2/plugins/snapshots/native"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"
	"github.com/containerd/errdefs"
	containerdlog "github.com/containerd/log" //nolint:depguard // the library takes its logger from the context
	bolt "go.etcd.io/bbolt"                   //nolint:depguard // handed to the library as it is
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/erofs"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/extract"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/snapproxy"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/userns"
)

// Names of the snapshotters.
const (
	Overlay = "overlayfs"
	Native  = "native"
	Erofs   = "erofs"
)

const (
	// openTimeout bounds the wait for the database of another process.
	openTimeout = 10 * time.Second
	// asidePrefix begins the name of a lost layer's folder that could not be removed.
	asidePrefix = "lost-"
)

// Config says where the storage is and how it keeps layers.
type Config struct {
	// Root is the folder that holds everything; it is made if it is missing.
	Root string
	// Snapshotter is the default one, "overlayfs", "native", "erofs" or one of Proxies; empty selects
	// overlayfs where the file system supports it.
	Snapshotter string
	// Wanted are snapshotters that must work besides the default one.
	Wanted []string
	// Proxies are snapshotters in other processes by their names.
	Proxies map[string]Proxy
	// Own is the user namespace that the process runs in.
	Own userns.Namespace
	// Collected, if set, is told of each collection.
	Collected func(took time.Duration, err error)
}

// Proxy is a snapshotter in another process.
type Proxy struct {
	// Socket is the path of the process's unix socket.
	Socket string
	// Root is a folder on the file system on which it keeps its layers; empty means that of the
	// storage.
	Root string
}

// Storage is an open storage. Contexts given to the parts it returns must come from
// [Storage.Context].
type Storage struct {
	root     string
	log      *slog.Logger
	entry    *containerdlog.Entry
	bolt     *bolt.DB
	db       *metadata.DB
	blobs    content.Store
	images   images.Store
	leases   leases.Manager
	backends map[string]snapshots.Snapshotter
	erofs    *erofs.Snapshotter // which of backends, if any
	proxies  map[string]Proxy   // which of backends are in other processes
	standard string
	hideRest func() error // unmounts what nothing needs at the end; nil without erofs
	target   extract.Target
	usage    usageCache
	collect  *collector
	closing  chan struct{}

	closeOnce sync.Once
	closeErr  error
}

// Open opens or makes the storage, removes what interrupted pulls have left and starts the
// collector. The caller owes a Close. The context bounds the opening only.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (_ *Storage, err error) {
	if !filepath.IsAbs(cfg.Root) {
		return nil, fmt.Errorf("image root %q: absolute path wanted: %w", cfg.Root, errdefs.ErrInvalidArgument)
	}
	s := &Storage{root: cfg.Root, proxies: cfg.Proxies, log: log, entry: newEntry(ctx, log), closing: make(chan struct{}), target: extract.Target{Own: cfg.Own}}
	if err := os.MkdirAll(s.root, 0o700); err != nil {
		return nil, fmt.Errorf("image root: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.closeParts())
		}
	}()
	if err := s.openTemp(ctx); err != nil {
		return nil, err
	}
	if err := s.openSnapshotters(ctx, cfg); err != nil {
		return nil, err
	}
	if err := s.openDatabase(ctx); err != nil {
		return nil, err
	}
	if s.erofs != nil {
		s.hideRest = func() error {
			return s.erofs.HideRest(s.Context(context.WithoutCancel(ctx)), s.db.Snapshotter(Erofs))
		}
	}
	if err := s.sweep(s.Context(ctx)); err != nil {
		// The next start tries it again. A full disk, for one, is no reason not to serve the
		// pods that run, and their removal gives space back.
		s.log.WarnContext(ctx, "what interrupted pulls have left is not removed", slog.Any("error", err))
	}
	s.makeReserve(ctx)
	s.collect = startCollector(context.WithoutCancel(ctx), func(ctx context.Context) error {
		begun := time.Now()
		err := s.collectNow(ctx)
		if cfg.Collected != nil && ctx.Err() == nil {
			cfg.Collected(time.Since(begun), err)
		}
		return err
	}, log)
	return s, nil
}

// openTemp selects the folder for short-lived mounts and removes those of an earlier life.
func (s *Storage) openTemp(ctx context.Context) error {
	if err := mount.SetTempMountLocation(filepath.Join(s.root, "tmp")); err != nil {
		return fmt.Errorf("temporary mounts: %w", err)
	}
	warnings, err := mount.CleanupTempMounts(unix.MNT_DETACH)
	if err != nil {
		return fmt.Errorf("temporary mounts: %w", err)
	}
	for _, w := range warnings {
		s.log.WarnContext(ctx, "stale temporary mount not removed", slog.Any("error", w))
	}
	return nil
}

func (s *Storage) openSnapshotters(ctx context.Context, cfg Config) error {
	s.backends = make(map[string]snapshots.Snapshotter)
	for _, name := range []string{Overlay, Native, Erofs} {
		if err := s.removeLost(ctx, filepath.Join(s.root, name)); err != nil {
			return fmt.Errorf("%s snapshotter: %w", name, err)
		}
	}
	overlayRoot := filepath.Join(s.root, Overlay)
	if err := s.removeChecks(ctx, overlayRoot); err != nil {
		return fmt.Errorf("overlayfs snapshotter: %w", err)
	}
	overlayErr := supported(overlayRoot, overlayutils.Supported)
	if overlayErr == nil && s.target.Own.Nested() {
		overlayErr = supported(overlayRoot, keepsUserNotes)
		s.target.UserNotes = overlayErr == nil
	}
	if overlayErr == nil {
		opts := []overlay.Opt{overlay.AsynchronousRemove, overlay.WithUpperdirLabel, overlay.WithRemapIDs}
		if s.target.UserNotes {
			opts = append(opts, overlay.WithMountOptions([]string{userNotes}))
		}
		sn, err := overlay.NewSnapshotter(overlayRoot, opts...)
		if err != nil {
			return fmt.Errorf("overlayfs snapshotter: %w", err)
		}
		s.backends[Overlay] = sn
	}
	sn, err := native.NewSnapshotter(filepath.Join(s.root, Native))
	if err != nil {
		return fmt.Errorf("native snapshotter: %w", err)
	}
	s.backends[Native] = sn
	if err := s.openErofs(ctx, cfg); err != nil {
		return err
	}
	if err := s.openProxies(); err != nil {
		return err
	}

	switch wanted := cfg.Snapshotter; wanted {
	case "":
		s.standard = Overlay
		if overlayErr != nil {
			s.log.WarnContext(ctx, "overlayfs not supported, layers are copied", slog.Any("error", overlayErr))
			s.standard = Native
		}
	case Overlay:
		if overlayErr != nil {
			return fmt.Errorf("overlayfs snapshotter on %s: %w", overlayRoot, overlayErr)
		}
		s.standard = Overlay
	case Native, Erofs:
		s.standard = wanted
	default:
		if !s.Proxied(wanted) {
			return fmt.Errorf("snapshotter %q: overlayfs, native, erofs or a proxy snapshotter wanted: %w", wanted, errdefs.ErrInvalidArgument)
		}
		s.standard = wanted
	}
	return nil
}

// openErofs opens the erofs snapshotter if it is wanted, or has been: what is left in it is removed.
func (s *Storage) openErofs(ctx context.Context, cfg Config) error {
	root := filepath.Join(s.root, Erofs)
	wanted := cfg.Snapshotter == Erofs || slices.Contains(cfg.Wanted, Erofs)
	if _, err := os.Lstat(root); err != nil && !wanted {
		return nil
	}
	sn, err := erofs.New(root)
	switch {
	case err == nil:
		s.erofs, s.backends[Erofs] = sn, sn
	case wanted:
		return fmt.Errorf("erofs snapshotter: %w", err)
	default:
		s.log.WarnContext(ctx, "erofs snapshotter cannot be opened, its layers stay", slog.Any("error", err))
	}
	return nil
}

// supported says whether a snapshotter works in a folder, as check finds by trying it. A full disk is
// no answer: what has worked there works on, since what is in it must be used and removed.
func supported(root string, check func(root string) error) error {
	err := check(root)
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return err
	}
	if _, statErr := os.Stat(filepath.Join(root, "metadata.db")); statErr != nil {
		return err // there was none yet
	}
	return nil
}

// userNotes is the mount option by which overlayfs keeps its notes in attributes that any user may
// write. In a user namespace it cannot read or write others.
const userNotes = "userxattr"

// keepsUserNotes says whether the file system of a folder has such attributes.
func keepsUserNotes(folder string) error {
	const name = "user.overlay.check"
	err := unix.Setxattr(folder, name, []byte{'y'}, 0)
	if err != nil {
		return fmt.Errorf("the file system of %s keeps no attributes of users, which overlayfs needs in a user namespace: %w", folder, err)
	}
	return unix.Removexattr(folder, name)
}

// Target is what layers are extracted for.
func (s *Storage) Target() extract.Target { return s.target }

// checkPrefix begins the name of the folder in which the library tries whether overlayfs works.
const checkPrefix = "multiple-lowerdir-check"

// removeChecks removes the folders, with what is mounted there, of processes that were killed while
// they tried whether overlayfs works. One that cannot be removed is in nobody's way.
func (s *Storage) removeChecks(ctx context.Context, root string) error {
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), checkPrefix) {
			continue
		}
		path := filepath.Join(root, e.Name())
		err := mount.UnmountAll(filepath.Join(path, "merged"), unix.MNT_DETACH)
		if err == nil {
			err = os.RemoveAll(path)
		}
		if err != nil {
			s.log.WarnContext(ctx, "folder of an earlier check of overlayfs not removed", slog.String("path", path), slog.Any("error", err))
		}
	}
	return nil
}

func (s *Storage) openProxies() error {
	for name, p := range s.proxies {
		if s.backends[name] != nil {
			return fmt.Errorf("proxy snapshotter %q: the name is taken: %w", name, errdefs.ErrInvalidArgument)
		}
		sn, err := snapproxy.New(name, p.Socket)
		if err != nil {
			return err
		}
		s.backends[name] = sn
	}
	return nil
}

// Proxied says that a snapshotter is in another process.
func (s *Storage) Proxied(name string) bool {
	_, ok := s.proxies[name]
	return ok
}

// removeLost removes the folders of snapshots that are not in the database of a snapshotter,
// which is not open. A process that was killed before it had recorded a snapshot leaves one,
// and it is in the way of the next snapshot, which gets the same number. One that cannot be
// removed is put out of the way, and a later collection or start removes it.
func (s *Storage) removeLost(ctx context.Context, root string) error {
	entries, err := os.ReadDir(filepath.Join(root, "snapshots"))
	if errors.Is(err, fs.ErrNotExist) || len(entries) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	db, err := snapshotdb.NewMetaStore(filepath.Join(root, "metadata.db"))
	if err != nil {
		return err
	}
	known := map[string]string{}
	err = db.WithTransaction(ctx, false, func(ctx context.Context) error {
		known, err = snapshotdb.IDMap(ctx)
		if errdefs.IsNotFound(err) {
			return nil // nothing was ever recorded
		}
		return err
	})
	err = errors.Join(err, db.Close())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, ok := known[e.Name()]; ok {
			continue
		}
		path := filepath.Join(root, "snapshots", e.Name())
		err := erofs.Hide(erofs.Folder(root, e.Name()))
		if err == nil {
			err = os.RemoveAll(path)
		}
		if err == nil {
			continue
		}
		if !strings.HasPrefix(e.Name(), asidePrefix) {
			err = errors.Join(err, os.Rename(path, filepath.Join(root, "snapshots", asidePrefix+e.Name()+"-"+rand.Text())))
		}
		s.log.WarnContext(ctx, "folder of a lost layer cannot be removed yet", slog.String("path", path), slog.Any("error", err))
	}
	return nil
}

func (s *Storage) openDatabase(ctx context.Context) error {
	var err error
	if s.blobs, err = local.NewStore(filepath.Join(s.root, "content")); err != nil {
		return fmt.Errorf("content store: %w", err)
	}
	path := filepath.Join(s.root, "meta.db")
	options := *bolt.DefaultOptions
	options.Timeout = openTimeout
	if s.bolt, err = bolt.Open(path, 0o600, &options); err != nil {
		return fmt.Errorf("image database %s: %w", path, err)
	}
	s.db = metadata.NewDB(s.bolt, s.blobs, s.backends)
	if err := s.db.Init(ctx); err != nil {
		return fmt.Errorf("image database %s: %w", path, err)
	}
	s.images = metadata.NewImageStore(s.db)
	s.leases = metadata.NewLeaseManager(s.db)
	return nil
}

// Close stops the collector and closes the databases. Nothing may use the storage after it.
func (s *Storage) Close() error {
	s.closeOnce.Do(func() { s.closeErr = s.closeParts() })
	return s.closeErr
}

func (s *Storage) closeParts() error {
	if s.collect != nil {
		s.collect.stop()
	}
	close(s.closing)
	s.usage.wait()
	var errs []error
	if s.hideRest != nil {
		errs = append(errs, s.hideRest())
	}
	if s.bolt != nil {
		errs = append(errs, s.bolt.Close())
	}
	for name, sn := range s.backends {
		if err := sn.Close(); err != nil {
			errs = append(errs, fmt.Errorf("snapshotter %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// Context returns a context for use with the storage's parts: it carries the namespace and
// the logger.
func (s *Storage) Context(ctx context.Context) context.Context {
	return containerdlog.WithLogger(namespaces.WithNamespace(ctx, pod.Namespace), s.entry)
}

// Content returns the store of blobs as the database sees it.
func (s *Storage) Content() content.Store { return s.db.ContentStore() }

// Images returns the store of image names.
func (s *Storage) Images() images.Store { return s.images }

// DefaultSnapshotter returns the name of the snapshotter that is used when none is asked for.
func (s *Storage) DefaultSnapshotter() string { return s.standard }

// Snapshotter returns a snapshotter by name and the name itself; empty means the default.
func (s *Storage) Snapshotter(name string) (snapshots.Snapshotter, string, error) {
	if name == "" {
		name = s.standard
	}
	if sn := s.db.Snapshotter(name); sn != nil {
		return sn, name, nil
	}
	return nil, name, fmt.Errorf("snapshotter %q: %w", name, errdefs.ErrNotFound)
}

// Snapshotters returns the names of the snapshotters.
func (s *Storage) Snapshotters() []string {
	names := make([]string, 0, len(s.backends))
	for name := range s.backends {
		names = append(names, name)
	}
	return names
}

// Rebases says whether a snapshotter takes the layers of an image without those below them.
func (s *Storage) Rebases(name string) bool { return name == Overlay || name == Erofs }

// Lower tells where the layers of such a snapshotter are.
func (s *Storage) Lower(name string) extract.Lower {
	return extract.Lower{
		Folders: func(ctx context.Context, layer string) ([]string, func(), error) { return s.folders(ctx, name, layer) },
		Alike:   name == Erofs,
	}
}

// folders are those of a layer and of the ones below it, the topmost first.
func (s *Storage) folders(ctx context.Context, name, layer string) (dirs []string, release func(), err error) {
	dirs, err = extract.Folders(ctx, s.db.Snapshotter(name), layer)
	if err != nil || name != Erofs {
		return dirs, func() {}, err
	}
	done, err := s.erofs.Hold(ctx, dirs)
	if err != nil {
		return nil, nil, err
	}
	return dirs, func() { done(); s.CollectSoon() }, nil
}

// Update runs fn with a context in which changes of images and content belong to one
// durable transaction.
func (s *Storage) Update(ctx context.Context, fn func(ctx context.Context) error) error {
	return s.db.Update(func(tx *bolt.Tx) error {
		return fn(boltutil.WithTransaction(ctx, tx))
	})
}

// Sync makes durable what was written into the snapshots of a snapshotter so far. It must
// come before the record that tells of them.
func (s *Storage) Sync(name string) error {
	dir, err := os.Open(s.Mountpoint(name))
	if err != nil {
		return fmt.Errorf("sync of snapshotter %s: %w", name, err)
	}
	defer dir.Close()
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return fmt.Errorf("sync of snapshotter %s: %w", name, err)
	}
	return nil
}

// Mountpoint returns the folder of a snapshotter, which names the file system it is on.
func (s *Storage) Mountpoint(name string) string {
	p, ok := s.proxies[name]
	switch {
	case !ok:
		return filepath.Join(s.root, name)
	case p.Root == "":
		return s.root
	}
	return p.Root
}
