package containerio

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crilog"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	nameStdin  = "stdin"
	nameStdout = "stdout"
	nameStderr = "stderr"
	// maxRecords is the size above which a buffer for records is not kept.
	maxRecords = 128 << 10
)

// containerIO is the IO of one container.
type containerIO struct {
	id      string
	dir     string
	stdio   pod.Stdio
	once    bool
	log     *crilog.File
	fanout  *fanout
	sources []*source
	// done is closed when all output has been written and the log is closed.
	done chan struct{}

	// mu guards stdin.
	mu    sync.Mutex
	stdin *os.File // keeps the FIFO open between clients; nil if there is none or it was closed
}

// openContainer makes or finds the FIFOs and starts the pumps.
//
//nolint:revive // each argument is one thing, and there is one caller
func openContainer(ctx context.Context, dir, id string, spec port.IOSpec, maxLine int, log *slog.Logger, dropped *atomic.Uint64) (_ *containerIO, err error) {
	c := &containerIO{id: id, dir: dir, once: spec.StdinOnce, fanout: newFanout(), done: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.abandon())
		}
	}()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	at := crilog.Place{Dir: spec.LogDir, Path: spec.LogPath}
	if spec.Running {
		c.log = crilog.Resume(ctx, at, log, dropped)
	} else if c.log, err = crilog.Open(at, log, dropped); err != nil {
		return nil, err
	}
	out, err := c.open(nameStdout)
	if err != nil {
		return nil, err
	}
	c.stdio = pod.Stdio{Stdout: out.path, Terminal: spec.Terminal}
	pumps := map[string]*source{crilog.Stdout: out}
	if !spec.Terminal {
		errs, err := c.open(nameStderr)
		if err != nil {
			return nil, err
		}
		c.stdio.Stderr = errs.path
		pumps[crilog.Stderr] = errs
	}
	if spec.Stdin {
		if err := c.openStdin(); err != nil {
			return nil, err
		}
	}
	c.pump(context.WithoutCancel(ctx), pumps, maxLine)
	return c, nil
}

func (c *containerIO) open(name string) (*source, error) {
	s, err := openSource(filepath.Join(c.dir, name))
	if err != nil {
		return nil, err
	}
	c.sources = append(c.sources, s)
	return s, nil
}

// openStdin opens the input for both directions: that needs no reader yet, and keeps one
// client's end from being the end of the input.
func (c *containerIO) openStdin() error {
	path := filepath.Join(c.dir, nameStdin)
	if err := makeFIFO(path); err != nil {
		return err
	}
	f, err := openFIFO(path, os.O_RDWR)
	if err != nil {
		return err
	}
	c.stdin, c.stdio.Stdin = f, path
	return nil
}

// abandon closes what a failed opening had opened.
func (c *containerIO) abandon() error {
	var errs []error
	for _, s := range c.sources {
		errs = append(errs, s.close())
	}
	if c.stdin != nil {
		errs = append(errs, c.stdin.Close())
	}
	if c.log != nil {
		errs = append(errs, c.log.Close())
	}
	return errors.Join(errs...)
}

// pump starts one pump per stream. They end with their streams, or at an interrupt.
func (c *containerIO) pump(ctx context.Context, streams map[string]*source, maxLine int) {
	var wg sync.WaitGroup
	for name, s := range streams {
		wg.Go(func() { c.pumpStream(ctx, name, s, maxLine) })
	}
	go func() {
		wg.Wait()
		for _, s := range c.sources {
			_ = s.close()
		}
		_ = c.log.Close()
		close(c.done)
	}()
}

// pumpStream writes a stream into the log and to the clients.
func (c *containerIO) pumpStream(ctx context.Context, name string, s *source, maxLine int) {
	l := crilog.NewLines(name, maxLine)
	var records []byte
	s.copyTo(func(chunk []byte) {
		if c.log.Path() != "" {
			records = l.Append(records[:0], chunk, time.Now())
			c.log.Write(ctx, records)
			if cap(records) > maxRecords {
				records = nil
			}
		}
		c.fanout.publish(name, chunk)
	})
	c.log.Write(ctx, l.Flush(nil, time.Now()))
}

// attach connects a client.
func (c *containerIO) attach(ctx context.Context, s pod.Streams, start func(func()), stdinClosed func()) error {
	client := c.fanout.join(s)
	defer c.fanout.leave(client)
	in, err := c.clientStdin(s.Stdin)
	if err != nil {
		return err
	}
	if in != nil {
		var once sync.Once
		end := func() {
			once.Do(func() {
				_ = in.Close()
				if c.once && c.closeStdin() == nil {
					stdinClosed()
				}
			})
		}
		defer end()
		start(func() {
			_, _ = io.Copy(in, s.Stdin)
			end()
		})
	}
	return client.serve(ctx, c.done)
}

// clientStdin opens the input for one client; nil if there is nothing to connect.
func (c *containerIO) clientStdin(from io.Reader) (*os.File, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if from == nil || c.stdin == nil {
		return nil, nil
	}
	f, err := openFIFO(c.stdio.Stdin, os.O_WRONLY)
	if err != nil {
		return nil, fmt.Errorf("input of container %q: %w", c.id, err)
	}
	return f, nil
}

// errNoStdin says that the input is closed already.
var errNoStdin = fmt.Errorf("input is closed: %w", errdefs.ErrFailedPrecondition)

// closeStdin closes the input for good.
func (c *containerIO) closeStdin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stdin == nil {
		return errNoStdin
	}
	f := c.stdin
	c.stdin = nil
	return f.Close()
}

// drain waits until all output of an ended process has been written.
func (c *containerIO) drain(ctx context.Context) error {
	for _, s := range c.sources {
		s.poke()
	}
	return c.wait(ctx)
}

func (c *containerIO) wait(ctx context.Context) error {
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("output of container %q: %w", c.id, context.Cause(ctx))
	}
}

// stop ends the pumps after what is in the FIFOs was written. The FIFOs stay.
func (c *containerIO) stop(ctx context.Context) error {
	for _, s := range c.sources {
		s.interrupt()
	}
	if err := c.closeStdin(); err != nil && !errors.Is(err, errNoStdin) {
		return err
	}
	return c.wait(ctx)
}
