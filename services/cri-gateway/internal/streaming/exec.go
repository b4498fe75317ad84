package streaming

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	utilexec "k8s.io/utils/exec"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/client"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/listen"
)

// inputChunk is how much input goes into one message to sandboxd.
const inputChunk = 32 << 10

// process is sandboxd's end of a session.
type process struct {
	send func(*containerv1.Input) error
	// recv returns the next message; at the process' end io.EOF, or an
	// utilexec.CodeExitError for an exit code other than zero.
	recv func() (*containerv1.Output, error)
}

// exec runs a command for a client. Errors: utilexec.CodeExitError, and why the command
// could not be run.
func (s *Server) exec(ctx context.Context, req execSession, c *client.Client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.containers.Exec(ctx)
	if err != nil {
		return err
	}
	start := &containerv1.ExecStart{
		ContainerId: req.containerID,
		Cmd:         req.command,
		Tty:         req.streams.Terminal,
		Stdin:       req.streams.Stdin,
		Stdout:      req.streams.Stdout,
		Stderr:      req.streams.Stderr,
	}
	first := &containerv1.ExecRequest{Message: &containerv1.ExecRequest_Start{Start: start}}
	if err := stream.Send(first); err != nil && !errors.Is(err, io.EOF) {
		return err // an end of the stream is explained by what is received
	}
	return pump(ctx, cancel, c, c.Stdin, process{
		send: func(in *containerv1.Input) error {
			return stream.Send(&containerv1.ExecRequest{Message: &containerv1.ExecRequest_Input{Input: in}})
		},
		recv: func() (*containerv1.Output, error) {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil, fmt.Errorf("command ended without an exit code: %w", io.ErrUnexpectedEOF)
			}
			if err != nil {
				return nil, err
			}
			if code, ok := m.GetMessage().(*containerv1.ExecResponse_ExitCode); ok {
				return nil, exitError(code.ExitCode)
			}
			return m.GetOutput(), nil
		},
	})
}

func exitError(code int32) error {
	if code == 0 {
		return io.EOF
	}
	return utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
}

// attach connects a client to a container's first process until either ends.
func (s *Server) attach(ctx context.Context, req attachSession, c *client.Client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.containers.Attach(ctx)
	if err != nil {
		return err
	}
	takesInput := req.streams.Stdin && req.stdin
	start := &containerv1.AttachStart{
		ContainerId: req.containerID,
		Tty:         req.terminal,
		Stdin:       takesInput,
		Stdout:      req.streams.Stdout,
		Stderr:      req.streams.Stderr,
	}
	first := &containerv1.AttachRequest{Message: &containerv1.AttachRequest_Start{Start: start}}
	if err := stream.Send(first); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	input := c.Stdin
	if !takesInput && input != nil {
		// What the client sends all the same must not block its other streams.
		c.Go(func() { _, _ = io.Copy(io.Discard, c.Stdin) })
		input = nil
	}
	return pump(ctx, cancel, c, input, process{
		send: func(in *containerv1.Input) error {
			return stream.Send(&containerv1.AttachRequest{Message: &containerv1.AttachRequest_Input{Input: in}})
		},
		recv: func() (*containerv1.Output, error) {
			m, err := stream.Recv()
			return m.GetOutput(), err
		},
	})
}

// pump carries input and output until the process ends or the client is gone. It returns
// nil if the process ended well. cancel must end the process' stream.
func pump(ctx context.Context, cancel context.CancelFunc, c *client.Client, stdin io.Reader, p process) error {
	chunks := make(chan []byte)
	var tasks sync.WaitGroup
	if stdin != nil {
		// A read from the client ends no earlier than its connection, which has to
		// stay for the outcome; Client.Close waits for it.
		c.Go(func() { readInput(ctx, stdin, chunks) })
	}
	tasks.Go(func() { sendInput(ctx, c.Sizes(), chunks, p) })
	err := receiveOutput(c, p)
	cancel()
	tasks.Wait()
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// readInput reads the client's input; it closes chunks at its end.
func readInput(ctx context.Context, stdin io.Reader, chunks chan<- []byte) {
	defer close(chunks)
	for {
		buf := make([]byte, inputChunk)
		n, err := stdin.Read(buf)
		if n > 0 {
			select {
			case chunks <- buf[:n]:
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// sendInput is the one goroutine that sends to the process.
func sendInput(ctx context.Context, sizes <-chan *containerv1.TerminalSize, chunks <-chan []byte, p process) {
	for {
		var in *containerv1.Input
		select {
		case <-ctx.Done():
			return
		case size := <-sizes:
			in = &containerv1.Input{Input: &containerv1.Input_Resize{Resize: size}}
		case chunk, ok := <-chunks:
			if ok {
				in = &containerv1.Input{Input: &containerv1.Input_Stdin{Stdin: chunk}}
				break
			}
			chunks = nil // sizes may still come
			in = &containerv1.Input{Input: &containerv1.Input_StdinClosed{StdinClosed: &containerv1.StdinClosed{}}}
		}
		if p.send(in) != nil {
			return // the reason is received
		}
	}
}

// receiveOutput writes what the process writes, until its end.
func receiveOutput(c *client.Client, p process) error {
	for {
		out, err := p.recv()
		if err != nil {
			return err
		}
		switch o := out.GetOutput().(type) {
		case *containerv1.Output_Stdout:
			err = writeTo(c.Stdout, o.Stdout)
		case *containerv1.Output_Stderr:
			err = writeTo(c.Stderr, o.Stderr)
		}
		if err != nil {
			return err
		}
	}
}

func writeTo(w io.Writer, data []byte) error {
	if w == nil {
		return nil
	}
	if _, err := w.Write(data); err != nil {
		return errors.Join(listen.ErrGone, err)
	}
	return nil
}
