// Package reaper collects the ends of the processes that the shim started or adopted, and
// tells each to the one who waits for it.
//
// Only this package waits for child processes, for all of them at once. A process id means
// the same process until its end was collected, which happens under the same lock as sending
// signals: a signal never reaches a later process of the same number. An end that comes
// before anybody could ask for it is kept while some start is in progress, and told to the
// process of that start only. The package starts no processes except for Monitor's callers.
package reaper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Exit is the end of a process.
type Exit struct {
	Pid int
	// Status is the exit code, or 128 plus the number of the signal that ended it.
	Status int
	// At is when the end was collected.
	At time.Time
}

// Reaper collects ends. It is safe for concurrent use.
type Reaper struct {
	told sync.WaitGroup

	// mu guards everything below, and is held while an end is collected.
	mu       sync.Mutex
	seq      uint64
	children map[int]*Child
	early    map[int]earlyExit
	holds    map[*Hold]struct{}
}

// earlyExit is an end that nobody has asked for.
type earlyExit struct {
	exit Exit
	seq  uint64
}

// New returns a reaper. Nothing is collected before Run.
func New() *Reaper {
	return &Reaper{children: map[int]*Child{}, early: map[int]earlyExit{}, holds: map[*Hold]struct{}{}}
}

// Run collects ends at every signal until ctx ends. The signals are those of the kernel that
// children have ended.
func (r *Reaper) Run(ctx context.Context, signals <-chan os.Signal) {
	for {
		r.Reap()
		select {
		case <-ctx.Done():
			r.told.Wait()
			return
		case <-signals:
		}
	}
}

// Reap collects all ends that are there.
func (r *Reaper) Reap() {
	for r.reapOne() {
	}
}

func (r *Reaper) reapOne() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	var status unix.WaitStatus
	pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
	if errors.Is(err, unix.EINTR) {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	e := Exit{Pid: pid, Status: status.ExitStatus(), At: time.Now()}
	if status.Signaled() {
		e.Status = 128 + int(status.Signal())
	}
	c, known := r.children[pid]
	switch {
	case known:
		delete(r.children, pid)
		r.tell(c, e)
	case len(r.holds) > 0:
		r.seq++
		r.early[pid] = earlyExit{exit: e, seq: r.seq}
	}
	return true
}

// tell notes the end of a child and tells it; mu is held.
func (r *Reaper) tell(c *Child, e Exit) {
	c.ended = true
	r.told.Go(func() { c.notify(e) })
}

// Hold keeps ends that nobody has asked for yet.
type Hold struct {
	r     *Reaper
	since uint64
}

// Hold begins a start: from now on the end of any process is kept until Release, so that the
// started process can be claimed even after its end.
func (r *Reaper) Hold() *Hold {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := &Hold{r: r, since: r.seq}
	r.holds[h] = struct{}{}
	return h
}

// Release ends the start. Ends that were kept for nobody else are forgotten.
func (h *Hold) Release() {
	r := h.r
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.holds, h)
	oldest := r.seq
	for other := range r.holds {
		oldest = min(oldest, other.since)
	}
	for pid, e := range r.early {
		if len(r.holds) == 0 || e.seq <= oldest {
			delete(r.early, pid)
		}
	}
}

// Child is a process whose end is told.
type Child struct {
	r      *Reaper
	pid    int
	notify func(Exit)
	ended  bool // guarded by the reaper's mu
}

// Claim asks for the end of the process that was started since the hold; notify is called
// once, in a goroutine of its own.
func (h *Hold) Claim(pid int, notify func(Exit)) *Child {
	r := h.r
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &Child{r: r, pid: pid, notify: notify}
	e, early := r.early[pid]
	delete(r.early, pid)
	// An end from before the hold, or of a number that is alive now, is that of another
	// process, which had the number before.
	if early && e.seq > h.since && !isChild(pid) {
		r.tell(c, e.exit)
		return c
	}
	r.children[pid] = c
	return c
}

// isChild says whether there is a child of this number, running or ended but not collected.
func isChild(pid int) bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return !errors.Is(err, unix.ECHILD)
}

// Pid is the number of the process.
func (c *Child) Pid() int { return c.pid }

// Signal sends a signal. It fails with ErrNotFound if the process has ended.
func (c *Child) Signal(sig unix.Signal) error {
	return c.signal(sig, func() error { return unix.Kill(c.pid, sig) })
}

// SignalGroup sends a signal to the process group that the process leads, or to the process alone
// if it leads none. It fails with ErrNotFound if the process has ended.
func (c *Child) SignalGroup(sig unix.Signal) error {
	return c.signal(sig, func() error {
		err := unix.Kill(-c.pid, sig)
		if errors.Is(err, unix.ESRCH) {
			err = unix.Kill(c.pid, sig)
		}
		return err
	})
}

func (c *Child) signal(sig unix.Signal, send func() error) error {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	if c.ended {
		return fmt.Errorf("process %d has ended: %w", c.pid, errdefs.ErrNotFound)
	}
	err := send()
	switch {
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("process %d has ended: %w", c.pid, errdefs.ErrNotFound)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("signal %d: %w: %w", sig, err, errdefs.ErrInvalidArgument)
	case err != nil:
		return fmt.Errorf("signal process %d: %w", c.pid, err)
	}
	return nil
}
