package stdio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"sort"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/attach"
)

const (
	// readyTime is how long a logging program may take until it is ready.
	readyTime = 10 * time.Second
	// programTime is how long it may take to end after the end of the output.
	programTime = 12 * time.Second
)

// program is a running logging program.
type program struct {
	cmd     *exec.Cmd
	monitor runc.ProcessMonitor
	end     chan runc.Exit
}

// openProgram starts a logging program. It gets the outputs as descriptors 3 and 4 and says
// that it is ready by closing descriptor 5.
func (s *Streams) openProgram(ctx context.Context, n name) error {
	if s.cfg.Monitor == nil {
		return fmt.Errorf("output %q: %w", s.cfg.Stdout, errdefs.ErrNotImplemented)
	}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
	}()
	for n := 1; n <= 2; n++ {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		theirs = append(theirs, r)
		s.child[n] = w
	}
	ready, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	theirs = append(theirs, w)
	cmd := exec.Command(n.path, arguments(n.query)...) //nolint:noctx // it ends with its input
	cmd.Env = append(os.Environ(), "CONTAINER_ID="+s.cfg.ID, "CONTAINER_NAMESPACE="+s.cfg.Namespace)
	cmd.ExtraFiles = theirs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	end, err := s.cfg.Monitor.Start(cmd)
	if err != nil {
		return fmt.Errorf("logging program: %w", err)
	}
	s.closers = append(s.closers, &program{cmd: cmd, monitor: s.cfg.Monitor, end: end})
	for _, f := range theirs {
		_ = f.Close()
	}
	theirs = nil
	if s.cfg.Terminal {
		// The terminal is copied to the program.
		out := s.child[1]
		s.child[1] = nil
		s.sinks[attach.Output] = plainSink{out}
		s.closers = append([]io.Closer{closer{out}}, s.closers...)
	}
	deadline := time.Now().Add(readyTime)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = ready.SetReadDeadline(deadline)
	if _, err := ready.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("logging program %q is not ready: %w", n.path, errdefs.ErrUnavailable)
	}
	return nil
}

// arguments of a logging program: each key, followed by its values.
func arguments(q url.Values) []string {
	keys := make([]string, 0, len(q))
	for k := range q {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	var args []string
	for _, k := range keys {
		args = append(args, k)
		for _, v := range q[k] {
			if v != "" {
				args = append(args, v)
			}
		}
	}
	return args
}

// Close waits for the program, which ends with the outputs, and ends it if need be.
func (p *program) Close() error {
	ended := make(chan error, 1)
	go func() {
		_, err := p.monitor.Wait(p.cmd, p.end)
		ended <- err
	}()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t := time.NewTimer(programTime)
		select {
		case err := <-ended:
			t.Stop()
			return err
		case <-t.C:
			_ = p.cmd.Process.Signal(sig)
		}
	}
	return <-ended
}
