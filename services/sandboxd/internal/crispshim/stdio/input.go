package stdio

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// askAlive is how often a blocked input asks whether its sender is still there.
const askAlive = time.Second

// errNoStdin says that there is no open input.
var errNoStdin = fmt.Errorf("input is closed: %w", errdefs.ErrFailedPrecondition)

// runInput starts the copying of the input.
func (s *Streams) runInput() error {
	name, err := parseName(s.cfg.Stdin)
	if err != nil || name.scheme == "" {
		return err
	}
	if name.scheme == schemeLog {
		s.mu.Lock()
		s.once = name.query.Get("once") == "1"
		s.mu.Unlock()
		return nil
	}
	fifo, err := os.OpenFile(name.path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("input: %w", err)
	}
	keeper, err := os.OpenFile(name.path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return errors.Join(fmt.Errorf("input: %w", err), fifo.Close())
	}
	s.mu.Lock()
	s.keeper = keeper
	s.mu.Unlock()
	s.closers = append(s.closers, fifo)
	s.drainInput(fifo)
	return nil
}

// drainInput copies a FIFO to the process, until the last of its writers has gone.
func (s *Streams) drainInput(fifo *os.File) {
	done := make(chan struct{})
	s.closers = append(s.closers, waiter(done))
	go func() {
		defer close(done)
		newSource(fifo).copyTo(func(chunk []byte) error {
			return s.WriteStdin(chunk, func() bool { return true })
		})
		if !s.cfg.Terminal {
			_ = s.closePipe()
		}
	}()
}

// waiter waits for a goroutine when it is closed.
type waiter chan struct{}

// Close waits.
func (w waiter) Close() error {
	<-w
	return nil
}

// inputFile is what input is written to.
func (s *Streams) inputFile() (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed || s.cfg.Stdin == "":
		return nil, errNoStdin
	case s.cfg.Terminal && s.master != nil:
		return s.master, nil
	case s.stdin != nil:
		return s.stdin, nil
	default:
		return nil, errNoStdin
	}
}

// WriteStdin writes input. It blocks until the process takes it or alive, which is asked
// now and then, says no. It fails with ErrFailedPrecondition if there is no open input.
func (s *Streams) WriteStdin(p []byte, alive func() bool) error {
	for {
		f, err := s.inputFile()
		if err != nil {
			return err
		}
		_ = f.SetWriteDeadline(time.Now().Add(askAlive))
		n, err := f.Write(p)
		if p = p[n:]; err == nil || len(p) == 0 {
			return nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("%w: %w", errNoStdin, err)
		}
		if !alive() {
			return errNoStdin
		}
	}
}

// StdinEnded says that an attached client's input has ended.
func (s *Streams) StdinEnded() {
	s.mu.Lock()
	once := s.once
	s.mu.Unlock()
	if once && !s.cfg.Terminal {
		_ = s.closePipe()
	}
}

// CloseStdin lets the process see the end of its input once all of it is read.
func (s *Streams) CloseStdin() error {
	s.mu.Lock()
	keeper := s.keeper
	s.keeper = nil
	s.mu.Unlock()
	if keeper != nil {
		return keeper.Close()
	}
	name, err := parseName(s.cfg.Stdin)
	if err != nil || name.scheme != schemeLog || s.cfg.Terminal {
		return err
	}
	return s.closePipe()
}

// closePipe closes the shim's end of the input.
func (s *Streams) closePipe() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stdin == nil {
		return nil
	}
	f := s.stdin
	s.stdin = nil
	return f.Close()
}

// closeInput closes all that belongs to the input; the copying is waited for elsewhere.
func (s *Streams) closeInput() error {
	s.mu.Lock()
	keeper := s.keeper
	s.keeper = nil
	s.mu.Unlock()
	if keeper == nil {
		return s.closePipe()
	}
	return errors.Join(keeper.Close(), s.closePipe())
}
