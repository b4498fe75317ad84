package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/exec"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// execSyncCap is the most that ExecSync returns of a stream; CRI says 16 MiB and that the
// rest is discarded.
const execSyncCap = 16 << 20

// capped keeps the first bytes and takes the rest without keeping it.
type capped struct {
	buf []byte
	cap int
}

func (c *capped) Write(p []byte) (int, error) {
	c.buf = append(c.buf, p[:min(len(p), c.cap-len(c.buf))]...)
	return len(p), nil
}

// ExecSync implements ContainerService.
func (c *Container) ExecSync(ctx context.Context, req *containerv1.ExecSyncRequest) (*containerv1.ExecSyncResponse, error) {
	err := required("cmd", len(req.GetCmd()) > 0)
	if err != nil {
		return nil, err
	}
	id, err := c.engine.Views.ContainerID(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	stdout, stderr := &capped{cap: execSyncCap}, &capped{cap: execSyncCap}
	code, err := c.engine.Exec.Run(ctx, id, exec.Request{
		Cmd: req.GetCmd(), Streams: pod.Streams{Stdout: stdout, Stderr: stderr},
		Timeout: time.Duration(max(req.GetTimeoutSeconds(), 0)) * time.Second,
	})
	if err != nil {
		return nil, err
	}
	return &containerv1.ExecSyncResponse{Stdout: stdout.buf, Stderr: stderr.buf, ExitCode: code}, nil
}

// Exec implements ContainerService.
func (c *Container) Exec(stream containerv1.ContainerService_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	err = errors.Join(required("start", start != nil), required("start.cmd", len(start.GetCmd()) > 0))
	if err != nil {
		return err
	}
	id, err := c.engine.Views.ContainerID(start.GetContainerId())
	if err != nil {
		return err
	}
	s := newSession(stream.Context(), func(out *containerv1.Output) error {
		return stream.Send(&containerv1.ExecResponse{Message: &containerv1.ExecResponse_Output{Output: out}})
	})
	ctx, stop := s.receive(func() (*containerv1.Input, error) {
		req, err := stream.Recv()
		return req.GetInput(), err
	})
	defer stop()
	code, err := c.engine.Exec.Run(ctx, id, exec.Request{
		Cmd: start.GetCmd(), TTY: start.GetTty(), Resize: s.resize,
		Streams: s.streams(start.GetStdin(), start.GetStdout(), start.GetStderr() && !start.GetTty()),
		Started: func() {
			_ = s.send(func() error { // a client that is gone ends the context
				return stream.Send(&containerv1.ExecResponse{Message: &containerv1.ExecResponse_Started{Started: &containerv1.Started{}}})
			})
		},
	})
	if err != nil {
		return err
	}
	return stream.Send(&containerv1.ExecResponse{Message: &containerv1.ExecResponse_ExitCode{ExitCode: code}})
}

// Attach implements ContainerService.
func (c *Container) Attach(stream containerv1.ContainerService_AttachServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	start := first.GetStart()
	err = required("start", start != nil)
	if err != nil {
		return err
	}
	id, err := c.engine.Views.ContainerID(start.GetContainerId())
	if err != nil {
		return err
	}
	rec, err := c.engine.Views.Container(id)
	if err != nil {
		return err
	}
	if rec.GetConfig().GetTty() != start.GetTty() {
		return fmt.Errorf("tty: container %q was made with tty=%t: %w", id, rec.GetConfig().GetTty(), errdefs.ErrInvalidArgument)
	}
	s := newSession(stream.Context(), func(out *containerv1.Output) error {
		return stream.Send(&containerv1.AttachResponse{Message: &containerv1.AttachResponse_Output{Output: out}})
	})
	ctx, stop := s.receive(func() (*containerv1.Input, error) {
		req, err := stream.Recv()
		return req.GetInput(), err
	})
	defer stop()
	return c.engine.Exec.Attach(ctx, id, exec.AttachRequest{
		Resize:  s.resize,
		Streams: s.streams(start.GetStdin(), start.GetStdout(), start.GetStderr() && !start.GetTty()),
		Started: func() {
			_ = s.send(func() error { // a client that is gone ends the context
				return stream.Send(&containerv1.AttachResponse{Message: &containerv1.AttachResponse_Started{Started: &containerv1.Started{}}})
			})
		},
	})
}

// PortForward implements SandboxService.
func (s *Sandbox) PortForward(stream sandboxv1.SandboxService_PortForwardServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	target := first.GetTarget()
	if target == nil || target.GetPort() < 1 || target.GetPort() > 65535 {
		return fmt.Errorf("target.port: must be 1 to 65535: %w", errdefs.ErrInvalidArgument)
	}
	id, err := s.engine.Views.SandboxID(target.GetSandboxId())
	if err != nil {
		return err
	}
	conn, err := s.engine.Sandboxes.Dial(stream.Context(), id, int(target.GetPort()))
	if err != nil {
		return err
	}
	return relay(stream, conn)
}

// relay copies both ways until the port has nothing more to say or the client is gone.
func relay(stream sandboxv1.SandboxService_PortForwardServer, conn io.ReadWriteCloser) error {
	up := make(chan struct{})
	go func() {
		defer close(up)
		for {
			req, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				halfClose(conn)
				return
			}
			if err == nil {
				_, err = conn.Write(req.GetData())
			}
			if err != nil {
				_ = conn.Close() // ends the copying below
				return
			}
		}
	}()
	// Recv ends with the stream's context, which ends when this handler returns: the
	// goroutine is not waited for, but cannot outlive the call.
	defer func() { _ = conn.Close() }()
	buf := make([]byte, 32<<10)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			sendErr := stream.Send(&sandboxv1.PortForwardResponse{Data: buf[:n]})
			if sendErr != nil {
				return sendErr
			}
		}
		if err != nil {
			return nil
		}
	}
}

func halfClose(conn io.ReadWriteCloser) {
	if c, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite()
	}
}

// session is the client's side of a streamed exec or attach.
type session struct {
	parent context.Context //nolint:containedctx // lives as long as the stream
	sendMu chan struct{}   // one sender at a time, as gRPC demands
	output func(*containerv1.Output) error
	stdin  *io.PipeReader
	feed   *io.PipeWriter
	resize chan pod.TerminalSize
}

func newSession(ctx context.Context, output func(*containerv1.Output) error) *session {
	r, w := io.Pipe()
	return &session{parent: ctx, sendMu: make(chan struct{}, 1), output: output, stdin: r, feed: w, resize: make(chan pod.TerminalSize, 1)}
}

// receive takes the client's messages until the client goes, which ends the returned
// context. stop ends the receiving side.
func (s *session) receive(recv func() (*containerv1.Input, error)) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(s.parent)
	go func() { // ends with the stream's context at the latest
		for {
			in, err := recv()
			switch {
			case errors.Is(err, io.EOF):
				_ = s.feed.Close()
				return
			case err != nil:
				_ = s.feed.CloseWithError(err)
				cancel(fmt.Errorf("client is gone: %w", context.Canceled))
				return
			}
			s.take(ctx, in)
		}
	}()
	return ctx, func() {
		cancel(context.Canceled)
		_ = s.stdin.Close()
	}
}

func (s *session) take(ctx context.Context, in *containerv1.Input) {
	switch m := in.GetInput().(type) {
	case *containerv1.Input_Stdin:
		_, _ = s.feed.Write(m.Stdin) // fails only when nobody reads any more
	case *containerv1.Input_StdinClosed:
		_ = s.feed.Close()
	case *containerv1.Input_Resize:
		size := pod.TerminalSize{Width: m.Resize.GetWidth(), Height: m.Resize.GetHeight()}
		if size.Width == 0 || size.Height == 0 || size.Width > 65535 || size.Height > 65535 {
			return
		}
		select { // the newest size wins; nobody waits for a reader
		case <-s.resize:
		default:
		}
		select {
		case s.resize <- size:
		case <-ctx.Done():
		default:
		}
	}
}

func (s *session) send(fn func() error) error {
	s.sendMu <- struct{}{}
	defer func() { <-s.sendMu }()
	return fn()
}

type outputWriter struct {
	s    *session
	wrap func(p []byte) *containerv1.Output
}

func (w outputWriter) Write(p []byte) (int, error) {
	err := w.s.send(func() error { return w.s.output(w.wrap(p)) })
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

func (s *session) streams(stdin, stdout, stderr bool) pod.Streams {
	var out pod.Streams
	if stdin {
		out.Stdin = s.stdin
	} else {
		_ = s.stdin.Close() // what a client sends all the same is thrown away
	}
	if stdout {
		out.Stdout = outputWriter{s, func(p []byte) *containerv1.Output {
			return &containerv1.Output{Output: &containerv1.Output_Stdout{Stdout: p}}
		}}
	}
	if stderr {
		out.Stderr = outputWriter{s, func(p []byte) *containerv1.Output {
			return &containerv1.Output{Output: &containerv1.Output_Stderr{Stderr: p}}
		}}
	}
	return out
}
