package testenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is one of the four programs.
type Process string

// The four processes, in the order in which they are started.
const (
	EventBus Process = "eventbus"
	Sandboxd Process = "sandboxd"
	NRIHub   Process = "nri-hub"
	Gateway  Process = "cri-gateway"
)

func startOrder() []Process { return []Process{EventBus, Sandboxd, NRIHub, Gateway} }

// stopLimit is how long a process may take to end in good order.
const stopLimit = 20 * time.Second

var (
	errNotRunning = errors.New("not running")
	errShim       = errors.New("not one shim")
	errSlowStop   = errors.New("did not end in time and was killed")
)

// program is one process of a system over its several lives.
type program struct {
	name   Process
	path   string
	args   []string
	env    []string
	uid    uint32 // 0: as the caller
	folder string
	// passed are sockets for the next lives, by their names, as from a service manager.
	passed      []*os.File
	passedNames []string

	// mu guards the life at present.
	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
	err  error // why the last life ended; read after done is closed
}

func (p *program) logPath() string { return filepath.Join(p.folder, string(p.name)+".log") }

// start begins a new life. The process does not end with ctx: stop or kill end it.
func (p *program) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.alive() {
		return fmt.Errorf("%s: already running", p.name)
	}
	log, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(p.path, p.args...)
	cmd.Env = p.env
	if len(p.passed) > 0 {
		// The process must find its own id in its environment.
		cmd = exec.Command("sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`, p.path}, p.args...)...)
		cmd.Env = append(slices.Clone(p.env), fmt.Sprintf("LISTEN_FDS=%d", len(p.passed)), "LISTEN_FDNAMES="+strings.Join(p.passedNames, ":"))
		cmd.ExtraFiles = p.passed
	}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if p.uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: p.uid, Gid: p.uid}
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	done := make(chan struct{})
	p.cmd, p.done = cmd, done
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(done)
	}()
	return nil
}

func (p *program) alive() bool {
	if p.cmd == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *program) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.alive() {
		return 0
	}
	return p.cmd.Process.Pid
}

// signal sends a signal and waits for the end of the life it meets.
func (p *program) signal(ctx context.Context, sig syscall.Signal) error {
	p.mu.Lock()
	cmd, done, alive := p.cmd, p.done, p.alive()
	p.mu.Unlock()
	if !alive {
		return fmt.Errorf("%s: %w", p.name, errNotRunning)
	}
	if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s: %w", p.name, err)
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s after %s: %w", p.name, sig, ctx.Err())
	}
}

// stop ends the process in good order, and by force when that takes too long.
func (p *program) stop(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	err := p.signal(limited, syscall.SIGTERM)
	if errors.Is(err, context.DeadlineExceeded) {
		return errors.Join(fmt.Errorf("%s: %w", p.name, errSlowStop), p.signal(ctx, syscall.SIGKILL))
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return fmt.Errorf("%s ended with: %w", p.name, p.err)
	}
	return nil
}

// ShimOf finds the process of a pod's shim.
func (s *System) ShimOf(pod string) (int, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	parents := map[string]string{}
	for _, path := range paths {
		line, err := os.ReadFile(path) // of a process that may have ended
		if err == nil && bytes.Contains(line, []byte("shim")) && bytes.Contains(line, []byte(pod)) {
			stat, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "stat"))
			var state, parent string
			_, _ = fmt.Sscan(string(stat[bytes.LastIndexByte(stat, ')')+1:]), &state, &parent)
			parents[filepath.Base(filepath.Dir(path))] = parent
		}
	}
	var found []string
	for pid, parent := range parents {
		if parents[parent] == "" { // what a shim is just starting looks like it for a moment
			found = append(found, pid)
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("%w: processes %v look like the shim of pod %s", errShim, found, pod)
	}
	return strconv.Atoi(found[0])
}
