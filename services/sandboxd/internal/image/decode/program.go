package decode

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/diff"
	"golang.org/x/sys/unix"
)

const (
	// envMediaType is the variable that tells a program the type of what it reads.
	envMediaType = "STREAM_PROCESSOR_MEDIATYPE"
	// maxWords is how much is kept of what a program writes to its standard error, in bytes. It
	// ends in events of the pod.
	maxWords = 1 << 10
	// pipeGrace is how long descendants of an ended program may keep its pipes open.
	pipeGrace = 2 * time.Second
)

var (
	errStuck   = errors.New("neither reads nor writes")
	errLingers = errors.New("does not end after its output")
	errClosed  = errors.New("is closed")
)

// program is a running program as a stream. It is read from by one goroutine; another may
// close it.
type program struct {
	Program

	ctx      context.Context    //nolint:containedctx // of the one use that it is made for
	stop     context.CancelFunc // kills it with its descendants
	cmd      *exec.Cmd
	out      *os.File // its standard output
	in       source   // its standard input
	words    tail     // what it wrote to its standard error; of the goroutine that waits
	patience time.Duration

	exited  chan struct{} // closed when it was waited for
	waitErr error         // exited guards it

	outcome atomic.Pointer[error] // what reads return after the last byte
}

var _ diff.StreamProcessor = (*program)(nil)

// start runs a program on a stream. told, if any, is what it can read at descriptor 3.
func start(ctx context.Context, p Program, from diff.StreamProcessor, told []byte, patience time.Duration) (*program, error) {
	r := &program{Program: p, ctx: ctx, patience: patience, exited: make(chan struct{})}
	r.in.from = from
	out, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("stream processor %q: %w", p.Name, err)
	}
	defer write.Close()
	r.out = out
	running, stop := context.WithCancel(ctx)
	r.stop = stop
	r.cmd = exec.CommandContext(running, p.Path, p.Args...)
	r.cmd.Env = append(append(os.Environ(), p.Env...), envMediaType+"="+from.MediaType())
	r.cmd.Stdin, r.cmd.Stdout, r.cmd.Stderr = &r.in, write, &r.words
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	r.cmd.Cancel = func() error { return syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL) }
	r.cmd.WaitDelay = pipeGrace
	if told != nil {
		file, err := inMemory(told)
		if err != nil {
			stop()
			return nil, errors.Join(fmt.Errorf("stream processor %q: %w", p.Name, err), out.Close())
		}
		defer file.Close()
		r.cmd.ExtraFiles = []*os.File{file}
	}
	if err := r.run(); err != nil {
		stop()
		return nil, errors.Join(&Error{p.Name, err}, out.Close())
	}
	return r, nil
}

// run starts the program and has it waited for. The kernel takes the end of the thread that
// starts a process for its parent's, so that thread is kept for it.
func (r *program) run() error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(r.exited)
		err := r.cmd.Start()
		started <- err
		if err == nil {
			r.waitErr = r.cmd.Wait()
		}
	}()
	return <-started
}

// MediaType implements diff.StreamProcessor.
func (r *program) MediaType() string { return r.Returns }

// Read implements io.Reader.
func (r *program) Read(p []byte) (int, error) {
	if end := r.outcome.Load(); end != nil {
		return 0, *end
	}
	for {
		before := r.in.count.Load()
		if r.patience > 0 {
			if err := r.out.SetReadDeadline(time.Now().Add(r.patience)); err != nil {
				return 0, fmt.Errorf("stream processor %q: %w", r.Name, err)
			}
		}
		n, err := r.out.Read(p)
		switch {
		case err == nil:
			return n, nil
		case errors.Is(err, os.ErrClosed):
			return 0, &Error{r.Name, errClosed}
		case errors.Is(err, os.ErrDeadlineExceeded) && r.in.moved(before):
			continue
		}
		end := r.end(err)
		r.outcome.Store(&end)
		return n, end
	}
}

// end is called when there will be no more output that is wanted, and says what reads return
// from then on: io.EOF if all went well.
func (r *program) end(why error) error {
	if why == io.EOF { //nolint:errorlint // a pipe returns it as it is
		why = r.await()
	} else if errors.Is(why, os.ErrDeadlineExceeded) {
		why = fmt.Errorf("%w for %v", errStuck, r.patience)
	}
	r.stop()
	<-r.exited
	switch {
	case r.in.err != nil:
		return r.in.err
	case r.ctx.Err() != nil:
		return context.Cause(r.ctx)
	case why != nil:
		return r.failed(why)
	case r.waitErr == nil, errors.Is(r.waitErr, exec.ErrWaitDelay): // something that it left behind holds its pipes
		return io.EOF
	}
	return r.failed(r.waitErr)
}

// await waits until a program that writes no more has ended.
func (r *program) await() error {
	var late <-chan time.Time
	if r.patience > 0 {
		timer := time.NewTimer(r.patience)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-r.exited:
		return nil
	case <-late:
		return errLingers
	}
}

// failed adds to an error what the program has said.
func (r *program) failed(err error) error {
	if words := r.words.String(); words != "" {
		err = fmt.Errorf("%w: %s", err, words)
	}
	return &Error{r.Name, err}
}

// Close ends the program.
func (r *program) Close() error {
	r.stop()
	err := r.out.Close()
	<-r.exited
	return err
}

// source is what a program reads.
type source struct {
	from    io.Reader
	count   atomic.Int64
	waiting atomic.Bool // for from
	err     error       // of from; the end of the program guards it
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	s.waiting.Store(true)
	n, err := s.from.Read(p)
	s.waiting.Store(false)
	s.count.Add(int64(n))
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// moved says that the program took something since count was before, or cannot since there is
// nothing to take yet.
func (s *source) moved(before int64) bool { return s.waiting.Load() || s.count.Load() != before }

// tail keeps the end of what is written to it.
type tail struct {
	kept []byte
	cut  bool
}

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - maxWords; over > 0 {
		t.kept, t.cut = append(t.kept[:0], t.kept[over:]...), true
	}
	return len(p), nil
}

// String returns it in a form that can be shown.
func (t *tail) String() string {
	text := strings.ToValidUTF8(strings.TrimSpace(string(t.kept)), "?")
	if t.cut {
		text = "(cut off) " + text
	}
	return text
}

// inMemory returns a file without a name that has the content.
func inMemory(content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("payload", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("file in memory: %w", err)
	}
	file := os.NewFile(uintptr(fd), "payload")
	if _, err := file.Write(content); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}
