package network

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// settle is how long a change of the folder is left alone, since configurations are
	// often written in several steps.
	settle = 100 * time.Millisecond
	// recheck is how often the folder is looked at without a sign of change, and plugins
	// are asked for their status; recheckFailed the same while the network is not ready.
	recheck       = 30 * time.Second
	recheckFailed = 5 * time.Second
)

// Run follows changes of the configuration folder until ctx ends. The folder may come, go
// and come back. Without file notifications, which are a scarce resource, it looks again
// regularly. ready is called when the watch is set up.
func (c *CNI) Run(ctx context.Context, ready func()) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		c.log.WarnContext(ctx, "network configuration is not watched, only looked at regularly", slog.Any("error", err))
		w = &fsnotify.Watcher{} // its channels are nil and never say anything
	} else {
		defer func() { _ = w.Close() }() // nothing is lost with it
	}
	c.watch(w)
	if err := c.sweep(); err != nil {
		c.log.WarnContext(ctx, "temporary files of the network remain", slog.Any("error", err))
	}
	ready() // the configuration was read before; a slow plugin's status must not hold the start
	c.refresh(ctx)
	quiet := time.NewTimer(c.pause())
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.Events:
			quiet.Reset(settle)
		case err := <-w.Errors:
			c.log.DebugContext(ctx, "changes of the network configuration may have been missed", slog.Any("error", err))
			quiet.Reset(settle)
		case <-quiet.C:
			c.watch(w)
			c.refresh(ctx)
			quiet.Reset(c.pause())
		}
	}
}

// pause is the time until the next look if nothing happens.
func (c *CNI) pause() time.Duration {
	if c.Ready() != nil {
		return recheckFailed
	}
	return recheck
}

// watch watches the folder, or, while it is not there, the nearest one above it.
func (c *CNI) watch(w *fsnotify.Watcher) {
	if w.Events == nil {
		return
	}
	want := map[string]bool{filepath.Dir(c.cfg.ConfDir): true, c.cfg.ConfDir: true}
	for dir := c.cfg.ConfDir; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil || !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			want[dir] = true
			break
		}
	}
	for _, have := range w.WatchList() {
		if !want[have] {
			_ = w.Remove(have) // gone already
		}
	}
	for dir := range want {
		// One that is not there, or is watched already, is as it should be.
		_ = w.Add(dir)
	}
}

// reload reads the configuration anew. A wrong one makes the network not ready, but the
// last good one stays in use for pods that come meanwhile; an empty folder ends its use.
func (c *CNI) reload() {
	networks, err := load(c.cfg.ConfDir, c.cfg.MaxConfNum)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.loadErr = err
	if err != nil && !errors.Is(err, errNoNetwork) {
		return
	}
	if slices.EqualFunc(networks, c.networks, network.equal) {
		return
	}
	c.networks, c.status, c.wellAt = networks, unasked(networks), time.Time{}
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

func (n network) equal(other network) bool {
	return n.IfName == other.IfName && bytes.Equal(n.List.Bytes, other.List.Bytes)
}
