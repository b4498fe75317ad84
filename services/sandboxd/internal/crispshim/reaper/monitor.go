package reaper

import (
	"os/exec"
	"runtime"

	"github.com/containerd/go-runc"
)

var _ runc.ProcessMonitor = (*Monitor)(nil)

// Monitor lets commands be run beside a reaper, which would otherwise take their ends away
// from those who wait for them.
type Monitor struct{ r *Reaper }

// Monitor returns the monitor of this reaper.
func (r *Reaper) Monitor() *Monitor { return &Monitor{r: r} }

// Start starts a command and returns where its end will be told.
func (m *Monitor) Start(cmd *exec.Cmd) (chan runc.Exit, error) {
	h := m.r.Hold()
	defer h.Release()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return m.claim(h, cmd), nil
}

func (m *Monitor) claim(h *Hold, cmd *exec.Cmd) chan runc.Exit {
	end := make(chan runc.Exit, 1)
	h.Claim(cmd.Process.Pid, func(e Exit) {
		end <- runc.Exit{Timestamp: e.At, Pid: e.Pid, Status: e.Status}
		close(end)
	})
	return end
}

// StartLocked starts a command from a thread that lives as long as the command: the kernel
// takes the end of the thread for the end of the parent.
func (m *Monitor) StartLocked(cmd *exec.Cmd) (chan runc.Exit, error) {
	started := make(chan error, 1)
	told := make(chan runc.Exit, 1)
	m.r.told.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		end, err := m.Start(cmd)
		started <- err
		if err != nil {
			return
		}
		told <- <-end
		close(told)
	})
	if err := <-started; err != nil {
		return nil, err
	}
	return told, nil
}

// Wait waits for the end of a command and of the copying of its output.
func (m *Monitor) Wait(cmd *exec.Cmd, end chan runc.Exit) (int, error) {
	e := <-end
	// The end was collected already, which is all that this could complain about.
	_ = cmd.Wait()
	return e.Status, nil
}
