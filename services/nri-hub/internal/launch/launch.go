// Package launch runs the pre-installed plugins as supervised child processes.
//
// Each executable NN-name in the plugin folder is one plugin. It is started with one end
// of a socket pair as descriptor 3 and an environment of exactly NRI_PLUGIN_NAME,
// NRI_PLUGIN_IDX and NRI_PLUGIN_SOCKET; its output goes to the log. A plugin that ends is
// started again after a pause that grows with each quick failure. The folder is watched:
// new files are started, removed ones stopped, replaced ones restarted. A file that is no
// plugin is skipped with a warning and keeps no other from running. A WebAssembly module is
// given to the Server, which runs it inside the hub; each is loaded aside of the others.
//
// The package does not speak NRI: the connection is given to a Server.
package launch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/fsnotify/fsnotify"
)

// Server serves the connection to a launched plugin until it ends.
type Server interface {
	ServeLaunched(ctx context.Context, c net.Conn, p Plugin) error
	// ServeWasm runs a WebAssembly plugin until it ends. Compiling may take seconds.
	ServeWasm(ctx context.Context, p Plugin) error
}

// Plugin is a running pre-installed plugin.
type Plugin struct {
	Index, Name string
	PID         int32
	Path        string // of the executable
	// Config is the content of its configuration file, or empty.
	Config string
}

// Config says where plugins are and how they are run.
type Config struct {
	Folder       string        // with the executables; it need not exist
	ConfigFolder string        // with NN-name.conf or name.conf
	MinBackoff   time.Duration // pause before the first restart
	MaxBackoff   time.Duration // longest pause; a plugin that ran longer starts over
	StopTimeout  time.Duration // between SIGTERM and SIGKILL
	// Extra says how one plugin is run besides; nil means as all.
	Extra func(index, name string) Extra
}

// Extra is how one plugin is run besides.
type Extra struct {
	Env     map[string]string // variables besides NRI's own
	Rlimits map[string]uint64 // hard and soft limits by name; see Rlimits
}

// settleTime is how long the folder must be quiet before it is read again, so that a
// file that is being copied is not started half.
const settleTime = 300 * time.Millisecond

// Launcher keeps the plugins of a folder running. Use New.
type Launcher struct {
	cfg    Config
	log    *slog.Logger
	server Server
}

// New makes a launcher; it does nothing before Run.
func New(cfg Config, log *slog.Logger, server Server) *Launcher {
	return &Launcher{cfg: cfg, log: log, server: server}
}

// file is one executable. Another size, time or inode is another plugin.
type file struct {
	path        string
	index, name string
	modified    time.Time
	size        int64
	inode       uint64
}

// running is a plugin under supervision.
type running struct {
	stop context.CancelFunc
	done chan struct{}
}

// Run starts the plugins and returns after ctx has ended and all of them have stopped.
func (l *Launcher) Run(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch plugin folder: %w", err)
	}
	defer watcher.Close() //nolint:errcheck // nothing is lost
	missing := time.NewTicker(l.folderPoll())
	defer missing.Stop()
	watched := l.watch(ctx, watcher)
	if watched == nil {
		l.log.InfoContext(ctx, "no plugin folder yet", slog.String("path", l.cfg.Folder))
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	plugins := make(map[file]running)
	l.reconcile(ctx, &wg, plugins)
	quiet := time.NewTimer(0)
	defer quiet.Stop()
	<-quiet.C
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-missing.C:
			// It may come later, or another may have taken its place, of which a watcher, which
			// is with the old one, does not tell.
			there, err := os.Stat(l.cfg.Folder)
			switch {
			case watched != nil && (err != nil || !os.SameFile(there, watched)):
				l.unwatch(ctx, watcher)
				watched = nil
				quiet.Reset(settleTime)
			case watched == nil && err == nil:
				if watched = l.watch(ctx, watcher); watched != nil {
					quiet.Reset(settleTime)
				}
			default:
			}
		case <-watcher.Events:
			quiet.Reset(settleTime)
		case err := <-watcher.Errors:
			l.log.WarnContext(ctx, "plugin folder not watched completely", slog.Any("error", err))
			quiet.Reset(settleTime)
		case <-quiet.C:
			l.reconcile(ctx, &wg, plugins)
		}
	}
}

// watch begins to watch the folder and returns which one that is, nil if it does not.
func (l *Launcher) watch(ctx context.Context, watcher *fsnotify.Watcher) fs.FileInfo {
	// Looked at before it is watched: if another takes its place in between, that is noticed.
	folder, err := os.Stat(l.cfg.Folder)
	if err == nil {
		err = watcher.Add(l.cfg.Folder)
	}
	if err == nil {
		return folder
	}
	if !errors.Is(err, fs.ErrNotExist) {
		l.log.WarnContext(ctx, "plugin folder not watched", slog.String("path", l.cfg.Folder), slog.Any("error", err))
	}
	return nil
}

// unwatch forgets a folder that is no longer at its path.
func (l *Launcher) unwatch(ctx context.Context, watcher *fsnotify.Watcher) {
	if err := watcher.Remove(l.cfg.Folder); err != nil && !errors.Is(err, fsnotify.ErrNonExistentWatch) {
		l.log.DebugContext(ctx, "plugin folder still watched", slog.String("path", l.cfg.Folder), slog.Any("error", err))
	}
}

// inodeOf is the number of a file, zero if it has none.
func inodeOf(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

// folderPoll is how often a folder that is missing is looked for.
func (l *Launcher) folderPoll() time.Duration { return max(l.cfg.MinBackoff, 100*time.Millisecond) }

// reconcile starts and stops plugins until they are what the folder says.
func (l *Launcher) reconcile(ctx context.Context, wg *sync.WaitGroup, plugins map[file]running) {
	wanted := make(map[file]bool)
	for _, f := range l.scan(ctx) {
		wanted[f] = true
	}
	for f, r := range plugins {
		if !wanted[f] {
			l.log.InfoContext(ctx, "plugin file removed or replaced", slog.String("path", f.path))
			r.stop()
			<-r.done
			delete(plugins, f)
		}
	}
	for f := range wanted {
		if _, ok := plugins[f]; ok {
			continue
		}
		pctx, stop := context.WithCancel(ctx)
		r := running{stop: stop, done: make(chan struct{})}
		plugins[f] = r
		wg.Go(func() {
			defer close(r.done)
			defer stop()
			l.supervise(pctx, f)
		})
	}
}

// scan lists the plugins in the folder and warns of what looks like one and is none.
func (l *Launcher) scan(ctx context.Context) []file {
	entries, err := os.ReadDir(l.cfg.Folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		l.log.WarnContext(ctx, "plugin folder not read", slog.String("path", l.cfg.Folder), slog.Any("error", err))
	}
	var files []file
	for _, e := range entries {
		path := filepath.Join(l.cfg.Folder, e.Name())
		info, err := os.Stat(path) // follows links
		if err != nil {
			l.log.WarnContext(ctx, "plugin file skipped", slog.String("path", path), slog.Any("error", err))
			continue
		}
		if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			l.log.DebugContext(ctx, "file is not executable and no plugin", slog.String("path", path))
			continue
		}
		index, name, err := nri.ParsePluginName(e.Name())
		if err == nil {
			err = nri.CheckPluginName(name)
		}
		if err != nil {
			l.log.WarnContext(ctx, "plugin file skipped", slog.String("path", path), slog.Any("error", err))
			continue
		}
		files = append(files, file{path: path, index: index, name: name, modified: info.ModTime(), size: info.Size(), inode: inodeOf(info)})
	}
	return files
}

// configuration reads the plugin's configuration; the more exact file name counts.
func (l *Launcher) configuration(f file) (string, error) {
	for _, name := range []string{f.index + "-" + f.name + ".conf", f.name + ".conf"} {
		content, err := os.ReadFile(filepath.Join(l.cfg.ConfigFolder, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("configuration of plugin %q: %w", f.name, err)
		}
		return string(content), nil
	}
	return "", nil
}
