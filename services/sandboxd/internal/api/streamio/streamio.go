// Package streamio is the client's side of streamed calls: standard streams and terminal sizes of
// exec and attach, and the bytes of a forwarded port, in the messages of sandboxd's API.
package streamio

import (
	"context"
	"errors"
	"fmt"
	"io"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Forward copies both ways between a forwarded port and its client until the port has nothing
// more to say or the client is gone. It closes conn.
func Forward(stream sandboxv1.SandboxService_PortForwardServer, conn io.ReadWriteCloser) error {
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

// Session is the client's side of a streamed exec or attach. One goroutine uses it, besides
// those that write to its streams.
type Session struct {
	parent context.Context //nolint:containedctx // lives as long as the stream
	sendMu chan struct{}   // one sender at a time, as gRPC demands
	output func(*containerv1.Output) error
	stdin  *io.PipeReader
	feed   *io.PipeWriter
	resize chan pod.TerminalSize
}

// New returns a session on a stream with the context ctx; output sends to the client.
func New(ctx context.Context, output func(*containerv1.Output) error) *Session {
	r, w := io.Pipe()
	return &Session{parent: ctx, sendMu: make(chan struct{}, 1), output: output, stdin: r, feed: w, resize: make(chan pod.TerminalSize, 1)}
}

// Receive takes the client's messages until the client goes, which ends the returned
// context. stop ends the receiving side.
func (s *Session) Receive(recv func() (*containerv1.Input, error)) (context.Context, context.CancelFunc) {
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

// Resize has the newest size of the client's terminal.
func (s *Session) Resize() <-chan pod.TerminalSize { return s.resize }

func (s *Session) take(ctx context.Context, in *containerv1.Input) {
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

// Send calls fn, which sends a message of the stream, while nobody else sends.
func (s *Session) Send(fn func() error) error {
	s.sendMu <- struct{}{}
	defer func() { <-s.sendMu }()
	return fn()
}

type outputWriter struct {
	s    *Session
	wrap func(p []byte) *containerv1.Output
}

func (w outputWriter) Write(p []byte) (int, error) {
	err := w.s.Send(func() error { return w.s.output(w.wrap(p)) })
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Streams are the streams that the client wants, for the process.
func (s *Session) Streams(stdin, stdout, stderr bool) pod.Streams {
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
