package containerio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// releasePause is the time between two attempts to end a wait for the shim.
const releasePause = 50 * time.Millisecond

// execIO is the IO of one exec: its output goes to the client as fast as the client takes
// it, which is how a slow client slows the process instead of losing anything.
type execIO struct {
	dir       string
	stdio     pod.Stdio
	sources   []*source
	stdinDone chan struct{}
	// opened is closed when the input is open, or will not be.
	opened chan struct{}
	// done is closed when all output has reached the client.
	done chan struct{}
	once sync.Once

	// mu guards the rest.
	mu      sync.Mutex
	stdin   *os.File
	closing bool
}

// openExec makes the FIFOs of an exec and starts copying.
func openExec(dir string, terminal bool, s pod.Streams, start func(func())) (_ *execIO, err error) {
	e := &execIO{dir: dir, stdinDone: make(chan struct{}), opened: make(chan struct{}), done: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.abandon())
		}
	}()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	e.stdio.Terminal = terminal
	var copies []func()
	if s != (pod.Streams{}) {
		// A shim wants all outputs or none.
		if e.stdio.Stdout, err = e.output(nameStdout, orDiscard(s.Stdout), &copies); err != nil {
			return nil, err
		}
		if !terminal {
			if e.stdio.Stderr, err = e.output(nameStderr, orDiscard(s.Stderr), &copies); err != nil {
				return nil, err
			}
		}
	}
	if s.Stdin != nil {
		e.stdio.Stdin = filepath.Join(dir, nameStdin)
		if err := makeFIFO(e.stdio.Stdin); err != nil {
			return nil, err
		}
	}
	e.run(copies)
	if s.Stdin == nil {
		close(e.opened)
		close(e.stdinDone)
		return e, nil
	}
	// Not waited for by Close: it ends when the client's input does.
	start(func() { e.copyInput(s.Stdin) })
	return e, nil
}

// copyInput copies the client's input.
func (e *execIO) copyInput(from io.Reader) {
	defer close(e.stdinDone)
	f := e.openInput()
	if f == nil {
		return
	}
	_, _ = io.Copy(f, from)
	_ = f.Close()
}

// openInput waits for the shim to open its end: what is written before, and closed, would be
// lost. It returns nil if the exec is closed first.
func (e *execIO) openInput() *os.File {
	defer close(e.opened)
	f, err := os.OpenFile(e.stdio.Stdin, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		_ = f.Close()
		return nil
	}
	e.stdin = f
	return f
}

// closeInput ends the copying of the input: a wait for the shim, or a write that waits for
// the process to read.
func (e *execIO) closeInput() {
	if e.stdio.Stdin == "" {
		return
	}
	e.mu.Lock()
	e.closing = true
	e.mu.Unlock()
	for open := false; !open; {
		// A reader lets the opening return, however the shim fared.
		reader, err := openFIFO(e.stdio.Stdin, os.O_RDONLY)
		select {
		case <-e.opened:
			open = true
		case <-time.After(releasePause):
		}
		if err == nil {
			_ = reader.Close()
		}
	}
	if e.stdin != nil {
		_ = e.stdin.Close()
	}
}

func orDiscard(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}

// output opens the FIFO of a stream whose bytes go to w.
func (e *execIO) output(name string, w io.Writer, copies *[]func()) (string, error) {
	s, err := openSource(filepath.Join(e.dir, name))
	if err != nil {
		return "", err
	}
	e.sources = append(e.sources, s)
	*copies = append(*copies, func() {
		gone := false
		s.copyTo(func(chunk []byte) {
			// Without its client the process runs on, and its output is thrown away.
			if gone {
				return
			}
			if _, err := w.Write(chunk); err != nil {
				gone = true
			}
		})
	})
	return s.path, nil
}

// run runs the copies and notes their end.
func (e *execIO) run(copies []func()) {
	var wg sync.WaitGroup
	for _, c := range copies {
		wg.Go(c)
	}
	go func() {
		wg.Wait()
		close(e.done)
	}()
}

// Stdio returns the FIFOs for the shim.
func (e *execIO) Stdio() pod.Stdio { return e.stdio }

// StdinDone is closed when the client's input has ended and all of it was written.
func (e *execIO) StdinDone() <-chan struct{} { return e.stdinDone }

// Drain waits until all output of the ended process has reached the client.
func (e *execIO) Drain(ctx context.Context) error {
	for _, s := range e.sources {
		s.poke()
	}
	select {
	case <-e.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("output of exec: %w", context.Cause(ctx))
	}
}

// Close ends the copying and removes the FIFOs. It waits for a write to the client that is
// in progress, but not for the client's input.
func (e *execIO) Close() error {
	var err error
	e.once.Do(func() {
		for _, s := range e.sources {
			s.interrupt()
		}
		e.closeInput()
		<-e.done
		err = errors.Join(e.closeSources(), os.RemoveAll(e.dir))
	})
	return err
}

func (e *execIO) closeSources() error {
	var errs []error
	for _, s := range e.sources {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}

// abandon closes and removes what a failed opening had made.
func (e *execIO) abandon() error {
	return errors.Join(e.closeSources(), os.RemoveAll(e.dir))
}
