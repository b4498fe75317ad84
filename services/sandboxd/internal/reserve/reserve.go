// Package reserve keeps back a little of a file system, so that a node whose disk is full
// can still be told to stop and remove things, which is how it gets space again.
//
// The space is a file that is given up when the file system runs full, and made again when
// there is plenty. It cannot keep whoever filled the disk from taking the rest too. It is
// safe for concurrent use.
package reserve

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// size is what is kept back: enough for a good many changes of the databases.
	size = 4 << 20
	// low is the free space at which the reserve is given up, plenty that at which it is
	// made again.
	low    = 1 << 20
	plenty = 4 * size
	// lookInterval is the pause between two looks at the free space.
	lookInterval = time.Second
)

// Reserve is the space kept back on one file system.
type Reserve struct {
	path string
	log  *slog.Logger

	mu sync.Mutex // one change of the file at a time
}

// New returns the reserve in a folder, which is made if it is missing. If the disk is full
// the reserve is given up at once, so that the process can start.
func New(ctx context.Context, folder string, log *slog.Logger) (*Reserve, error) {
	err := os.MkdirAll(folder, 0o700)
	if err != nil {
		return nil, fmt.Errorf("reserve: %w", err)
	}
	r := &Reserve{path: filepath.Join(folder, "reserve"), log: log}
	r.Look(ctx)
	return r, nil
}

// Run looks at the free space until ctx ends.
func (r *Reserve) Run(ctx context.Context, ready func()) error {
	ready()
	tick := time.NewTicker(lookInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			r.Look(ctx)
		}
	}
}

// Look gives up the reserve or makes it again, as the free space demands.
func (r *Reserve) Look(ctx context.Context) {
	var st unix.Statfs_t
	err := unix.Statfs(filepath.Dir(r.path), &st)
	if err != nil {
		return
	}
	free := st.Bavail * uint64(st.Bsize)
	switch {
	case free < low || st.Files > 0 && st.Ffree == 0:
		r.Release(ctx)
	case free > plenty:
		r.keep(ctx)
	}
}

// Release gives up the reserve and says whether there was one.
func (r *Reserve) Release(ctx context.Context) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := os.Remove(r.path)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			r.log.WarnContext(ctx, "reserve of the disk is not given up", slog.Any("error", err))
		}
		return false
	}
	r.log.WarnContext(ctx, "disk is full, the reserve is given up", slog.String("path", r.path))
	return true
}

// keep makes the file if it is missing.
func (r *Reserve) keep(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if st, err := os.Stat(r.path); err == nil && st.Size() == size {
		return
	}
	file, err := os.OpenFile(r.path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		err = errors.Join(unix.Fallocate(int(file.Fd()), 0, 0, size), file.Close())
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		r.log.WarnContext(ctx, "reserve of the disk is not made", slog.Any("error", err))
	}
}
