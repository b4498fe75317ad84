// Package containerio connects the standard streams of processes, which shims open as FIFOs,
// with logs in the CRI format and with clients.
//
// Of each container's output every byte goes into its log once and in the order of its
// stream, and to each attached client. A log that cannot be written loses records, with a
// count, but never holds up the container; a client that reads too slowly is disconnected.
// An exec has no log, and its client sets the pace. After a restart of the process the FIFOs
// are opened again and the output goes on; what a container wrote meanwhile waits in its
// FIFO as long as the shim lives, up to the size of a pipe.
package containerio

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Config says where the FIFOs lie and how logs are written.
type Config struct {
	// Dir holds a folder of FIFOs per container.
	Dir string
	// MaxLineSize is the most content of one log record in bytes; 0 for the default.
	MaxLineSize int
	// StdinClosed, if set, is called when the input of a container with StdinOnce has been
	// closed, so that the shim is told to close its end too.
	StdinClosed func(ctx context.Context, containerID string)
}

// IO holds the IO of all containers. It is safe for concurrent use.
type IO struct {
	cfg     Config
	log     *slog.Logger
	dropped atomic.Uint64
	// inputs are copies from clients, which end when the clients do.
	inputs sync.WaitGroup

	// mu guards containers.
	mu         sync.Mutex
	containers map[string]*containerIO
}

// New returns the IO of the containers with FIFOs under a folder.
func New(cfg Config, log *slog.Logger) *IO {
	return &IO{cfg: cfg, log: log, containers: map[string]*containerIO{}}
}

// DroppedLogBytes is how many bytes of log records could not be written.
func (o *IO) DroppedLogBytes() uint64 { return o.dropped.Load() }

// Open makes the container's FIFOs, or finds them after a restart, and pumps its output into
// the log until the shim has closed them. Opening what is open returns the same FIFOs.
func (o *IO) Open(ctx context.Context, containerID string, spec port.IOSpec) (pod.Stdio, error) {
	if err := identifiers.Validate(containerID); err != nil {
		return pod.Stdio{}, fmt.Errorf("container id: %w", err)
	}
	o.mu.Lock()
	c, exists := o.containers[containerID]
	if !exists {
		o.containers[containerID] = nil // being opened
	}
	o.mu.Unlock()
	switch {
	case c != nil:
		return c.stdio, nil
	case exists:
		return pod.Stdio{}, fmt.Errorf("io of container %q is being opened: %w", containerID, errdefs.ErrUnavailable)
	}
	log := o.log.With(slog.String("container_id", containerID))
	c, err := openContainer(ctx, o.dir(containerID), containerID, spec, o.cfg.MaxLineSize, log, &o.dropped)
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		delete(o.containers, containerID)
		return pod.Stdio{}, fmt.Errorf("io of container %q: %w", containerID, err)
	}
	o.containers[containerID] = c
	return c.stdio, nil
}

func (o *IO) dir(containerID string) string { return filepath.Join(o.cfg.Dir, containerID) }

func (o *IO) get(containerID string) (*containerIO, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.containers[containerID]
	if c == nil {
		return nil, fmt.Errorf("io of container %q: %w", containerID, errdefs.ErrNotFound)
	}
	return c, nil
}

// ReopenLog opens the container's log file anew. It fails with ErrFailedPrecondition when
// the output has ended; no file is made if it fails.
func (o *IO) ReopenLog(_ context.Context, containerID string) error {
	c, err := o.get(containerID)
	if err != nil {
		return err
	}
	if err := c.log.Reopen(); err != nil {
		return fmt.Errorf("container %q: %w", containerID, err)
	}
	return nil
}

// Attach connects a client until the container's output ends or ctx does. The client gets
// the output from now on. Its input is copied until it ends, which with StdinOnce is the end
// of the container's input. After the return one read of the client's input may still be
// pending; it is the caller who ends it.
func (o *IO) Attach(ctx context.Context, containerID string, streams pod.Streams) error {
	c, err := o.get(containerID)
	if err != nil {
		return err
	}
	closed := func() {
		if o.cfg.StdinClosed != nil {
			o.cfg.StdinClosed(context.WithoutCancel(ctx), containerID)
		}
	}
	if err := c.attach(ctx, streams, o.inputs.Go, closed); err != nil {
		return fmt.Errorf("attach to container %q: %w", containerID, err)
	}
	return nil
}

// Drain waits, bounded by ctx, until all output of a container whose process has ended was
// written. An unknown container has none left.
func (o *IO) Drain(ctx context.Context, containerID string) error {
	c, err := o.get(containerID)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return c.drain(ctx)
}

// Close ends the pumps, after what is in the FIFOs was written, and removes the FIFOs. An
// unknown container is not an error.
func (o *IO) Close(ctx context.Context, containerID string) error {
	if identifiers.Validate(containerID) != nil {
		return nil //nolint:nilerr // no container can have such an id
	}
	if c, err := o.get(containerID); err == nil {
		if err := c.stop(ctx); err != nil {
			return err
		}
		o.mu.Lock()
		if o.containers[containerID] == c {
			delete(o.containers, containerID)
		}
		o.mu.Unlock()
	}
	if err := os.RemoveAll(o.dir(containerID)); err != nil {
		return fmt.Errorf("io of container %q: %w", containerID, err)
	}
	return nil
}

// OpenExec makes the FIFOs of an exec and connects the client. Output that the client does
// not want is thrown away; a client that wants no stream at all has no FIFOs.
func (o *IO) OpenExec(_ context.Context, containerID, execID string, terminal bool, streams pod.Streams) (port.ExecIO, error) {
	for _, id := range []string{containerID, execID} {
		if err := identifiers.Validate(id); err != nil {
			return nil, fmt.Errorf("exec: %w", err)
		}
	}
	dir := filepath.Join(o.dir(containerID), "exec-"+execID)
	e, err := openExec(dir, terminal, streams, o.inputs.Go)
	if err != nil {
		return nil, fmt.Errorf("io of exec %q of container %q: %w", execID, containerID, err)
	}
	return e, nil
}

// Stop ends all pumps, bounded by ctx, and leaves the FIFOs for the next process. It waits
// for the inputs of clients too, whose connections must have been ended before.
func (o *IO) Stop(ctx context.Context) error {
	o.mu.Lock()
	open := make([]*containerIO, 0, len(o.containers))
	for _, c := range o.containers {
		if c != nil {
			open = append(open, c)
		}
	}
	clear(o.containers)
	o.mu.Unlock()
	var errs []error
	for _, c := range open {
		errs = append(errs, c.stop(ctx))
	}
	ended := make(chan struct{})
	go func() {
		o.inputs.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		errs = append(errs, context.Cause(ctx))
	}
	return errors.Join(errs...)
}
