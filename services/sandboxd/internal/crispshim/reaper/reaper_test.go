package reaper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) {
	testkit.Main(m, goleak.IgnoreTopFunction("os/signal.loop"))
}

// start runs a reaper for a test.
func start(t *testing.T) *Reaper {
	t.Helper()
	r := New()
	ctx, cancel := context.WithCancel(t.Context())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGCHLD)
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx, signals)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		signal.Stop(signals)
	})
	return r
}

func TestEndsAreTold(t *testing.T) {
	r := start(t)
	for _, tc := range []struct {
		script string
		status int
	}{{"exit 0", 0}, {"exit 3", 3}, {"kill -9 $$", 137}} {
		h := r.Hold()
		cmd := exec.Command("/bin/sh", "-c", tc.script)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ends := make(chan Exit, 1)
		h.Claim(cmd.Process.Pid, func(e Exit) { ends <- e })
		h.Release()
		if e := testkit.Receive(t, ends); e.Status != tc.status || e.Pid != cmd.Process.Pid || e.At.IsZero() {
			t.Errorf("%s: %+v", tc.script, e)
		}
		_ = cmd.Process.Release()
	}
}

// An end that was collected before the claim is told all the same.
func TestEarlyEnd(t *testing.T) {
	r := start(t)
	h := r.Hold()
	defer h.Release()
	cmd := exec.Command("/bin/sh", "-c", "exit 5")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	for isChild(pid) {
		time.Sleep(time.Millisecond)
	}
	ends := make(chan Exit, 1)
	c := h.Claim(pid, func(e Exit) { ends <- e })
	if e := testkit.Receive(t, ends); e.Status != 5 {
		t.Errorf("%+v", e)
	}
	if err := c.Signal(unix.SIGKILL); !errdefs.IsNotFound(err) {
		t.Errorf("signal after the end: %v", err)
	}
	_ = cmd.Process.Release()
}

// The end of an earlier process of the same number is not taken for the end of the new one.
func TestReusedNumber(t *testing.T) {
	r := New()
	cmd := exec.Command("/bin/sleep", "100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	old := r.Hold()
	r.mu.Lock()
	r.seq++
	r.early[pid] = earlyExit{exit: Exit{Pid: pid, Status: 9}, seq: r.seq}
	r.mu.Unlock()
	ends := make(chan Exit, 1)
	// Alive, so the kept end cannot be its own.
	c := old.Claim(pid, func(e Exit) { ends <- e })
	select {
	case e := <-ends:
		t.Fatalf("told %+v", e)
	default:
	}
	if err := c.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for len(ends) == 0 {
		r.Reap()
		time.Sleep(time.Millisecond)
	}
	if e := <-ends; e.Status != 128+int(unix.SIGTERM) {
		t.Errorf("%+v", e)
	}
	// Dead, but the kept end is older than the start.
	r.mu.Lock()
	r.early[pid] = earlyExit{exit: Exit{Pid: pid, Status: 9}, seq: r.seq}
	r.mu.Unlock()
	young := r.Hold()
	young.Claim(pid, func(e Exit) { ends <- e })
	r.told.Wait()
	if len(ends) != 0 {
		t.Errorf("told %+v", <-ends)
	}
	young.Release()
	old.Release()
	if len(r.early) != 0 {
		t.Errorf("kept without a hold: %v", r.early)
	}
	_ = cmd.Process.Release()
}

func TestMonitor(t *testing.T) {
	r := start(t)
	m := r.Monitor()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			cmd := exec.Command("/bin/sh", "-c", "echo hello; exit 4")
			begin := m.Start
			if i%2 == 0 {
				begin = m.StartLocked
			}
			var out capture
			cmd.Stdout = &out
			end, err := begin(cmd)
			if err != nil {
				t.Error(err)
				return
			}
			if status, err := m.Wait(cmd, end); err != nil || status != 4 || string(out) != "hello\n" {
				t.Errorf("%d, %v, %q", status, err, out)
			}
		})
	}
	wg.Wait()
	for _, begin := range []func(*exec.Cmd) error{
		func(c *exec.Cmd) error { _, err := m.Start(c); return err },
		func(c *exec.Cmd) error { _, err := m.StartLocked(c); return err },
	} {
		if err := begin(exec.Command("/does/not/exist")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("start of nothing: %v", err)
		}
	}
}

type capture []byte

func (c *capture) Write(p []byte) (int, error) {
	*c = append(*c, p...)
	return len(p), nil
}

// A signal for a group reaches what the process has started; one that leads no group is signalled
// alone.
func TestSignalGroup(t *testing.T) {
	r := start(t)
	for _, leads := range []bool{true, false} {
		h := r.Hold()
		cmd := exec.Command("/bin/sh", "-c", "sleep 100 & echo $!; wait")
		cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: leads}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ends := make(chan Exit, 1)
		c := h.Claim(cmd.Process.Pid, func(e Exit) { ends <- e })
		h.Release()
		var child int
		if _, err := fmt.Fscan(out, &child); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.PidfdOpen(child, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := c.SignalGroup(unix.SIGKILL); err != nil {
			t.Error(err)
		}
		if e := testkit.Receive(t, ends); e.Status != 137 {
			t.Errorf("leads %t: status %d", leads, e.Status)
		}
		if !leads {
			err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			if err != nil {
				t.Errorf("a child of one that leads no group: %v", err)
			}
		}
		_, err = io.ReadAll(out) // ends with the last process that has it
		if err != nil {
			t.Error(err)
		}
		if err := c.SignalGroup(unix.SIGKILL); !errdefs.IsNotFound(err) {
			t.Errorf("signal after the end: %v", err)
		}
	}
}
