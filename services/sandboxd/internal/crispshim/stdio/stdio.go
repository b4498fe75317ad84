// Package stdio connects the standard streams of a process with what the runtime named for
// them: the log of a container in the CRI format, FIFOs, plain files, or a logging program.
//
// An output is named by a path of a FIFO or by a URI:
//
//	/path, fifo:///path    a FIFO
//	crilog:///path?max_line=N&dir=D  a log in the CRI format that does not leave the folder D,
//	                       of which attached clients get a copy; without path only clients
//	                       get the output
//	file:///path           a file, appended to
//	binary:///path?a=b     a program that gets the output as its descriptors 3 and 4
//
// The input is a FIFO or, as "crilog:", what attached clients send; with once=1 it ends with
// the first of them. A name that is empty means no stream.
//
// The process writes into pipes, or its terminal, of which the shim holds the other end: no
// reader of the output is needed for the process to run, except for the one that was named.
// A log is written whether or not clients are attached or the runtime is there. The package
// starts no process but the logging program.
package stdio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/console"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crilog"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/attach"
)

// Config names the streams of one process.
type Config struct {
	Terminal              bool
	Stdin, Stdout, Stderr string
	// UID and GID own the process's ends of the pipes.
	UID, GID int
	// ID and Namespace are told to a logging program.
	ID, Namespace string
	// Monitor starts a logging program.
	Monitor runc.ProcessMonitor
}

// Streams are the connected streams of one process. They are safe for concurrent use after
// they were opened.
type Streams struct {
	cfg Config
	log *slog.Logger
	hub *attach.Hub

	sinks map[attach.Kind]sink
	// child are the process's ends, closed once it has them.
	child [3]*os.File
	// ours are the shim's ends of the outputs.
	ours map[attach.Kind]*os.File
	// copying is how many outputs are being copied.
	copying atomic.Int32
	// drained is closed when all output has been written.
	drained chan struct{}
	closers []io.Closer
	file    *crilog.File // the log; nil if there is none

	// mu guards the rest.
	mu      sync.Mutex
	master  *os.File // the terminal
	stdin   *os.File // the shim's end of the input; nil if there is none, or it is closed
	keeper  *os.File // keeps a FIFO's end from being the end of the input
	once    bool
	running bool
	closed  bool
}

// Open opens what is named for a process that is about to be started.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (_ *Streams, err error) {
	s := &Streams{
		cfg: cfg, log: log, sinks: map[attach.Kind]sink{}, ours: map[attach.Kind]*os.File{}, drained: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if err := s.openSinks(ctx); err != nil {
		return nil, err
	}
	if cfg.Terminal {
		return s, nil
	}
	for kind, n := range map[attach.Kind]int{attach.Output: 1, attach.Errors: 2} {
		if err := s.openOutput(kind, n); err != nil {
			return nil, err
		}
	}
	if cfg.Stdin == "" {
		return s, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s.child[0], s.stdin = r, w
	return s, s.own(r)
}

// openOutput makes the process's end of an output.
func (s *Streams) openOutput(kind attach.Kind, n int) error {
	if s.child[n] != nil {
		// A logging program reads from the process without the shim in between.
		return s.own(s.child[n])
	}
	if s.sinks[kind] == nil {
		f, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
		s.child[n] = f
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	s.child[n], s.ours[kind] = w, r
	return s.own(w)
}

func (s *Streams) own(f *os.File) error {
	if s.cfg.UID == 0 && s.cfg.GID == 0 {
		return nil
	}
	return f.Chown(s.cfg.UID, s.cfg.GID)
}

// Set gives the process its ends.
func (s *Streams) Set(cmd *exec.Cmd) {
	if s.child[0] != nil {
		cmd.Stdin = s.child[0]
	}
	cmd.Stdout, cmd.Stderr = s.child[1], s.child[2]
}

// CloseAfterStart closes the process's ends in the shim.
func (s *Streams) CloseAfterStart() error {
	var errs []error
	for n, f := range s.child {
		if f != nil {
			errs = append(errs, f.Close())
			s.child[n] = nil
		}
	}
	return errors.Join(errs...)
}

// Stdin implements runc.IO, which nothing here needs.
func (s *Streams) Stdin() io.WriteCloser { return nil }

// Stdout implements runc.IO, which nothing here needs.
func (s *Streams) Stdout() io.ReadCloser { return nil }

// Stderr implements runc.IO, which nothing here needs.
func (s *Streams) Stderr() io.ReadCloser { return nil }

// Run closes the process's ends and starts the copying once the process has its ends; c is its terminal, nil for none.
func (s *Streams) Run(c console.Console) error {
	if err := s.CloseAfterStart(); err != nil {
		return err
	}
	if c != nil {
		master, err := ownConsole(c)
		if err != nil {
			return fmt.Errorf("terminal: %w", err)
		}
		s.ours[attach.Output] = master
		s.mu.Lock()
		s.master = master
		s.mu.Unlock()
	}
	if err := s.runInput(); err != nil {
		return err
	}
	s.mu.Lock()
	s.running = true
	s.mu.Unlock()
	s.copying.Store(int32(len(s.ours)))
	if len(s.ours) == 0 {
		close(s.drained)
	}
	for kind, f := range s.ours {
		out := s.sinks[kind]
		if out == nil {
			out = discard{}
		}
		// Waited for by Close.
		go s.copyOutput(f, out)
	}
	return nil
}

// copyOutput copies one output to its end.
func (s *Streams) copyOutput(f *os.File, out sink) {
	newSource(f).copyTo(out.write)
	// A reader sees the end of a FIFO only now.
	out.finish()
	if s.copying.Add(-1) == 0 {
		if s.file != nil {
			_ = s.file.Close()
		}
		close(s.drained)
	}
}

// ownConsole takes a terminal over as a file that does not block a thread.
func ownConsole(c console.Console) (*os.File, error) {
	fd, err := unix.FcntlInt(c.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(err, unix.Close(fd), c.Close())
	}
	return os.NewFile(uintptr(fd), "terminal"), c.Close()
}

// Hub is where attached clients get the output; nil if nobody can attach.
func (s *Streams) Hub() *attach.Hub { return s.hub }

// Drained is closed when all output has been written: when no process holds an output open
// any more.
func (s *Streams) Drained() <-chan struct{} { return s.drained }

// ReopenLog opens the log anew. It fails with ErrFailedPrecondition if the output has ended
// or is not logged here.
func (s *Streams) ReopenLog() error {
	select {
	case <-s.drained:
		return fmt.Errorf("output has ended: %w", errdefs.ErrFailedPrecondition)
	default:
	}
	if s.file == nil {
		return fmt.Errorf("output is not logged here: %w", errdefs.ErrFailedPrecondition)
	}
	return s.file.Reopen()
}

// Resize changes the size of the terminal. It fails with ErrFailedPrecondition without one.
func (s *Streams) Resize(width, height uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.master == nil {
		return fmt.Errorf("process has no terminal: %w", errdefs.ErrFailedPrecondition)
	}
	raw, err := s.master.SyscallConn()
	if err != nil {
		return err
	}
	size := &unix.Winsize{Col: uint16(min(width, 1<<16-1)), Row: uint16(min(height, 1<<16-1))}
	ctlErr := raw.Control(func(fd uintptr) { err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, size) })
	return errors.Join(ctlErr, err)
}

// Wait waits until all output has been written, or ctx ends.
func (s *Streams) Wait(ctx context.Context) error {
	select {
	case <-s.drained:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// closeTime bounds the wait for the copying after its end was asked for.
const closeTime = 5 * time.Second

// Close ends the copying, after what the process has written was copied within a bound, and
// closes everything.
func (s *Streams) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	running := s.running
	s.mu.Unlock()
	errs := []error{s.CloseAfterStart(), s.closeInput()}
	for _, f := range s.ours {
		// What is there is still read; then the copying ends.
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	if running {
		t := time.NewTimer(closeTime)
		select {
		case <-s.drained:
		case <-t.C:
		}
		t.Stop()
	}
	s.mu.Lock()
	s.master = nil
	s.mu.Unlock()
	for _, f := range s.ours {
		errs = append(errs, f.Close())
	}
	for _, c := range s.closers {
		errs = append(errs, c.Close())
	}
	if running {
		<-s.drained
	}
	if s.file != nil {
		errs = append(errs, s.file.Close())
	}
	return errors.Join(errs...)
}
