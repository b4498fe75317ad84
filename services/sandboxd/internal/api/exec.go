package api

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/api/streamio"
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
		Timeout: seconds(req.GetTimeoutSeconds()),
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
	s := streamio.New(stream.Context(), func(out *containerv1.Output) error {
		return stream.Send(&containerv1.ExecResponse{Message: &containerv1.ExecResponse_Output{Output: out}})
	})
	ctx, stop := s.Receive(func() (*containerv1.Input, error) {
		req, err := stream.Recv()
		return req.GetInput(), err
	})
	defer stop()
	code, err := c.engine.Exec.Run(ctx, id, exec.Request{
		Cmd: start.GetCmd(), TTY: start.GetTty(), Resize: s.Resize(),
		Streams: s.Streams(start.GetStdin(), start.GetStdout(), start.GetStderr() && !start.GetTty()),
		Started: func() {
			_ = s.Send(func() error { // a client that is gone ends the context
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
	s := streamio.New(stream.Context(), func(out *containerv1.Output) error {
		return stream.Send(&containerv1.AttachResponse{Message: &containerv1.AttachResponse_Output{Output: out}})
	})
	ctx, stop := s.Receive(func() (*containerv1.Input, error) {
		req, err := stream.Recv()
		return req.GetInput(), err
	})
	defer stop()
	return c.engine.Exec.Attach(ctx, id, exec.AttachRequest{
		Resize:  s.Resize(),
		Streams: s.Streams(start.GetStdin(), start.GetStdout(), start.GetStderr() && !start.GetTty()),
		Started: func() {
			_ = s.Send(func() error { // a client that is gone ends the context
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
	return streamio.Forward(stream, conn)
}
