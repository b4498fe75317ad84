// Package sockets keeps the folder where shims put their sockets.
//
// It removes those that are left there: a shim that is killed, or a start that ends before it has
// told its address, leaves one that nobody else knows of. Each shim has a folder below for what it
// passes to its OCI runtime (Passing), which goes with the shim.
package sockets

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/pause"
)

const (
	// sweepPause is the time between the two looks at a socket that nobody seems to use.
	sweepPause = 2 * time.Second
	// sweepDelay lets one sweep do for several starts that fail together.
	sweepDelay = 500 * time.Millisecond
	// dialTime bounds the question whether somebody listens.
	dialTime = time.Second
)

// Sweeper removes sockets. It is safe for concurrent use.
type Sweeper struct {
	dir  string
	used func() map[string]bool

	// mu guards what follows.
	mu  sync.Mutex
	due bool // a look by Soon is to come
}

// New returns a sweeper of a folder; an empty one means that there is none to sweep. used tells
// the paths of the sockets that belong to living shims.
func New(dir string, used func() map[string]bool) *Sweeper { return &Sweeper{dir: dir, used: used} }

// Remove removes the socket that a dead shim left, if it lies in the folder or in the shim's
// bundle. An empty path is nobody's socket.
func (s *Sweeper) Remove(path, bundle string) {
	parent := filepath.Dir(path)
	if path == "" || (parent != filepath.Clean(s.dir) && parent != bundle) {
		return
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() == os.ModeSocket {
		_ = os.Remove(path)
	}
}

// Sweep removes at once what nobody listens on. Nothing may be starting.
func (s *Sweeper) Sweep(ctx context.Context) {
	for _, path := range s.unused(ctx) {
		_ = os.Remove(path)
	}
}

// Soon removes, after a short while, the socket that a start may have left which was killed
// before it told its address. It returns at once if another call is about to look, and at the
// end of ctx.
func (s *Sweeper) Soon(ctx context.Context) {
	s.mu.Lock()
	due := s.due
	s.due = true
	s.mu.Unlock()
	if due {
		return // the look that is still to come sees this one too
	}
	s.after(ctx, sweepDelay, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.due = false
	})
}

// After removes what nobody uses after wait, or returns at the end of ctx.
func (s *Sweeper) After(ctx context.Context, wait time.Duration) { s.after(ctx, wait, func() {}) }

// after calls begin just before it looks. A socket must be found unused twice, since one that
// is just being made looks the same.
func (s *Sweeper) after(ctx context.Context, wait time.Duration, begin func()) {
	if !pause.For(ctx, wait) {
		return
	}
	begin()
	suspects := s.unused(ctx)
	if len(suspects) == 0 || !pause.For(ctx, sweepPause) {
		return
	}
	for _, path := range s.unused(ctx) {
		if slices.Contains(suspects, path) {
			_ = os.Remove(path)
		}
	}
}

// unused lists the sockets that belong to no shim and that nobody listens on.
func (s *Sweeper) unused(ctx context.Context) []string {
	if s.dir == "" {
		return nil
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil
	}
	used := s.used()
	var out []string
	for _, e := range entries {
		path := filepath.Join(s.dir, e.Name())
		if e.Type() == os.ModeSocket && !used[path] && refuses(ctx, path) {
			out = append(out, path)
		}
	}
	return out
}

// refuses says whether nobody accepts connections on a socket.
func refuses(ctx context.Context, path string) bool {
	d := net.Dialer{Timeout: dialTime}
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED)
	}
	_ = c.Close()
	return false
}
