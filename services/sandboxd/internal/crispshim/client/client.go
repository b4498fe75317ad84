// Package client is the runtime's side of the streams of containers whose shim writes their
// logs itself.
//
// It keeps nothing: what a container writes goes into its log without this process. Attaching,
// reopening a log and waiting for the end of the output ask the container's shim, at the
// socket in its pod's bundle. The streams of execs are FIFOs of another implementation.
package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crilog"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/attach"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/stdio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// RuntimeType is the type of the shims whose containers have these streams.
const RuntimeType = "io.containerd.crisp.v1"

// Execs are the streams of execs, as package containerio has them.
type Execs interface {
	// OpenExec makes the FIFOs of an exec and connects the client.
	OpenExec(ctx context.Context, containerID, execID string, terminal bool, streams pod.Streams) (port.ExecIO, error)
	// Close removes the FIFOs of a container's execs.
	Close(ctx context.Context, containerID string) error
}

// Config says how logs are written and where shims are found.
type Config struct {
	// MaxLineSize is the most content of one log record in bytes; 0 for the default.
	MaxLineSize int
	// Bundle finds the bundle of the pod of a container. It fails with ErrNotFound if there is
	// none.
	Bundle func(containerID string) (string, error)
	// Execs makes the streams of execs.
	Execs Execs
}

// IO is the IO of containers of such shims. It is safe for concurrent use.
type IO struct {
	cfg Config
	// inputs are copies from clients, which end when the clients do.
	inputs sync.WaitGroup
}

var _ port.IO = (*IO)(nil)

// New returns the IO.
func New(cfg Config) *IO { return &IO{cfg: cfg} }

// Open names the streams for the shim, which opens them. Nothing needs to be done after a
// restart.
func (o *IO) Open(_ context.Context, _ string, spec port.IOSpec) (pod.Stdio, error) {
	out := stdio.LogName(crilog.Place{Dir: spec.LogDir, Path: spec.LogPath}, o.cfg.MaxLineSize)
	s := pod.Stdio{Stdout: out, Terminal: spec.Terminal}
	if !spec.Terminal {
		s.Stderr = out
	}
	if spec.Stdin {
		s.Stdin = stdio.StdinName(spec.StdinOnce)
	}
	return s, nil
}

// ReopenLog opens the container's log file anew. It fails with ErrFailedPrecondition when
// the output has ended; no file is made if it fails.
func (o *IO) ReopenLog(ctx context.Context, containerID string) error {
	return o.ask(ctx, containerID, attach.OpReopen)
}

// Drain waits, bounded by ctx, until all output of a container whose process has ended was
// written. A container or a shim that is gone has none left.
func (o *IO) Drain(ctx context.Context, containerID string) error {
	err := o.ask(ctx, containerID, attach.OpDrain)
	if errdefs.IsNotFound(err) || errdefs.IsUnavailable(err) {
		return nil
	}
	return err
}

// Close removes what is held for a container's execs. The container's own streams end with
// its task.
func (o *IO) Close(ctx context.Context, containerID string) error {
	return o.cfg.Execs.Close(ctx, containerID)
}

// OpenExec makes the FIFOs of an exec and connects the client.
func (o *IO) OpenExec(ctx context.Context, containerID, execID string, terminal bool, streams pod.Streams) (port.ExecIO, error) {
	return o.cfg.Execs.OpenExec(ctx, containerID, execID, terminal, streams)
}

// Wait waits for the inputs of clients, whose connections must have been ended before.
func (o *IO) Wait() { o.inputs.Wait() }

// Attach connects a client until the container's output ends or ctx does. The client gets
// the output from now on. Its input is copied until it ends, which with StdinOnce is the end
// of the container's input. After the return one read of the client's input may still be
// pending; it is the caller who ends it.
func (o *IO) Attach(ctx context.Context, containerID string, streams pod.Streams) error {
	conn, err := o.request(ctx, attach.Ask{
		Op: attach.OpAttach, ID: containerID,
		Stdin: streams.Stdin != nil, Stdout: streams.Stdout != nil, Stderr: streams.Stderr != nil,
	})
	if err != nil {
		return fmt.Errorf("attach to container %q: %w", containerID, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if streams.Stdin != nil {
		o.inputs.Go(func() { sendInput(conn, streams.Stdin) })
	}
	err = receive(conn, streams)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("attach to container %q: %w", containerID, err)
	}
	return nil
}

// sendInput sends a client's input and its end.
func sendInput(conn net.Conn, from io.Reader) {
	buf := make([]byte, attach.MaxPayload)
	for {
		n, err := from.Read(buf)
		if n > 0 && attach.WriteFrame(conn, attach.Input, buf[:n]) != nil {
			return
		}
		if err != nil {
			// An input that fails has ended too.
			_ = attach.WriteFrame(conn, attach.Input, nil)
			return
		}
	}
}

// receive hands the output to the client until its end.
func receive(conn net.Conn, streams pod.Streams) error {
	buf := make([]byte, attach.MaxPayload)
	for {
		kind, payload, err := attach.ReadFrame(conn, buf)
		if err != nil {
			return fmt.Errorf("shim: %w: %w", err, errdefs.ErrUnavailable)
		}
		var to io.Writer
		switch kind {
		case attach.Output:
			to = streams.Stdout
		case attach.Errors:
			to = streams.Stderr
		case attach.End:
			return nil
		case attach.Refused:
			return attach.DecodeError(payload)
		}
		if to == nil {
			continue
		}
		if _, err := to.Write(payload); err != nil {
			return fmt.Errorf("client: %w", err)
		}
	}
}

// ask asks for an operation without streams.
func (o *IO) ask(ctx context.Context, containerID, op string) error {
	conn, err := o.request(ctx, attach.Ask{Op: op, ID: containerID})
	if err != nil {
		return fmt.Errorf("%s of container %q: %w", op, containerID, err)
	}
	return conn.Close()
}

// request connects to a container's shim, asks, and returns when the request is granted.
func (o *IO) request(ctx context.Context, ask attach.Ask) (net.Conn, error) {
	bundle, err := o.cfg.Bundle(ask.ID)
	if err != nil {
		return nil, err
	}
	conn, err := dial(ctx, bundle)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err = negotiate(conn, ask)
	if !stop() && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

func negotiate(conn net.Conn, ask attach.Ask) error {
	data, err := json.Marshal(ask)
	if err != nil {
		return err
	}
	if err := attach.WriteFrame(conn, attach.Request, data); err != nil {
		return fmt.Errorf("shim: %w: %w", err, errdefs.ErrUnavailable)
	}
	kind, payload, err := attach.ReadFrame(conn, make([]byte, attach.MaxPayload))
	switch {
	case err != nil:
		return fmt.Errorf("shim: %w: %w", err, errdefs.ErrUnavailable)
	case kind == attach.Refused:
		return attach.DecodeError(payload)
	case kind != attach.Granted:
		return fmt.Errorf("shim answered %q: %w", byte(kind), errdefs.ErrInternal)
	}
	return nil
}

// dial connects to the socket in a bundle. The path goes through a descriptor of the folder:
// the name of a socket must be short, that of a bundle is not.
func dial(ctx context.Context, bundle string) (net.Conn, error) {
	dir, err := os.OpenFile(bundle, unix.O_PATH|unix.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(dir.Fd()))+"/"+attach.SocketName)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		return nil, fmt.Errorf("shim in %s: %w: %w", bundle, err, errdefs.ErrUnavailable)
	case err != nil:
		return nil, fmt.Errorf("shim in %s: %w", bundle, err)
	}
	return conn, nil
}
