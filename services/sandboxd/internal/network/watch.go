package network

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
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

// Run follows changes of the configuration folders until ctx ends. They may come, go and come
// back. Without file notifications, which are a scarce resource, it looks again
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
		case <-c.again:
			quiet.Reset(0)
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
	if c.allReady() {
		return recheck
	}
	return recheckFailed
}

// watch watches the folders, or, while one is not there, the nearest one above it.
func (c *CNI) watch(w *fsnotify.Watcher) {
	if w.Events == nil {
		return
	}
	want := map[string]bool{}
	for _, f := range c.all() {
		want[filepath.Dir(f.ConfDir)], want[f.ConfDir] = true, true
		for dir := f.ConfDir; ; dir = filepath.Dir(dir) {
			if _, err := os.Stat(dir); err == nil || !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
				want[dir] = true
				break
			}
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
