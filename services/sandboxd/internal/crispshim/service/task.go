package service

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types/runc/options"
	taskv1 "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/stdio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task"
)

var _ taskapi.TTRPCTaskService = (*Services)(nil)

// version is what the shim tells of itself.
const version = "crisp"

// optionsOf reads the options of a runtime. Where there are none of a type that is known
// here, those of the pod are in force.
func (s *Services) optionsOf(a *anypb.Any) (*options.Options, error) {
	o := &options.Options{}
	if a.GetTypeUrl() != string(o.ProtoReflect().Descriptor().FullName()) {
		return s.podOptions()
	}
	if err := proto.Unmarshal(a.GetValue(), o); err != nil {
		return nil, fmt.Errorf("runtime options: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return o, nil
}

// podOptions reads the runtime options of the pod.
func (s *Services) podOptions() (*options.Options, error) {
	o := &options.Options{}
	data, err := os.ReadFile(s.optionsPath)
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	}
	if err != nil {
		return nil, err
	}
	if err := proto.Unmarshal(data, o); err != nil {
		return nil, fmt.Errorf("runtime options of the pod: %w: %w", err, errdefs.ErrDataLoss)
	}
	return o, nil
}

// Create creates a container.
func (s *Services) Create(ctx context.Context, r *taskapi.CreateTaskRequest) (*taskapi.CreateTaskResponse, error) {
	o, err := s.optionsOf(r.GetOptions())
	if err != nil {
		return nil, err
	}
	c, err := s.create(ctx, task.Spec{
		ID: r.GetID(), Bundle: r.GetBundle(), Rootfs: r.GetRootfs(), Terminal: r.GetTerminal(),
		Stdin: r.GetStdin(), Stdout: r.GetStdout(), Stderr: r.GetStderr(), Options: o,
		Checkpoint: r.GetCheckpoint(), ParentCheckpoint: r.GetParentCheckpoint(),
	})
	if err != nil {
		return nil, err
	}
	return &taskapi.CreateTaskResponse{Pid: pidOf(c, "")}, nil
}

func (s *Services) create(ctx context.Context, spec task.Spec) (*task.Container, error) {
	if err := s.reserve(spec.ID); err != nil {
		return nil, err
	}
	var c *task.Container
	defer func() { s.settle(spec.ID, c) }()
	if stdio.IsLog(spec.Stdout) {
		if err := s.listenStreams(ctx); err != nil {
			return nil, err
		}
	}
	var err error
	c, err = task.Create(ctx, s.host, spec)
	return c, err
}

func pidOf(c *task.Container, execID string) uint32 {
	p, err := c.Process(execID)
	if err != nil {
		return 0
	}
	return uint32(p.Pid())
}

// Start starts a process.
func (s *Services) Start(ctx context.Context, r *taskapi.StartRequest) (*taskapi.StartResponse, error) {
	p, err := s.process(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	pid, err := p.Start(ctx)
	if err != nil {
		return nil, err
	}
	return &taskapi.StartResponse{Pid: uint32(pid)}, nil
}

// Delete removes an ended process.
func (s *Services) Delete(ctx context.Context, r *taskapi.DeleteRequest) (*taskapi.DeleteResponse, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	p, err := c.Process(r.GetExecID())
	if err != nil {
		return nil, err
	}
	if r.GetExecID() == "" {
		if err := c.Delete(ctx); err != nil {
			return nil, err
		}
		s.forget(c)
	} else if p, err = c.DeleteExec(ctx, r.GetExecID()); err != nil {
		return nil, err
	}
	_, e := p.State()
	resp := &taskapi.DeleteResponse{Pid: uint32(e.Pid), ExitStatus: uint32(e.Status)}
	if !e.At.IsZero() {
		resp.ExitedAt = timestamppb.New(e.At)
	}
	return resp, nil
}

// Exec prepares a further process.
func (s *Services) Exec(_ context.Context, r *taskapi.ExecProcessRequest) (*emptypb.Empty, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	for _, name := range []string{r.GetStdin(), r.GetStdout(), r.GetStderr()} {
		if stdio.IsLog(name) {
			return nil, fmt.Errorf("exec %q: stream %q: %w", r.GetExecID(), name, errdefs.ErrNotImplemented)
		}
	}
	err = c.AddExec(r.GetExecID(), r.GetSpec().GetValue(), stdio.Config{
		Terminal: r.GetTerminal(), Stdin: r.GetStdin(), Stdout: r.GetStdout(), Stderr: r.GetStderr(),
	})
	return &emptypb.Empty{}, err
}

// State tells the state of a process.
func (s *Services) State(_ context.Context, r *taskapi.StateRequest) (*taskapi.StateResponse, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	p, err := c.Process(r.GetExecID())
	if err != nil {
		return nil, err
	}
	state, e := p.State()
	names := p.Names()
	resp := &taskapi.StateResponse{
		ID: r.GetID(), ExecID: r.GetExecID(), Bundle: c.Bundle(), Pid: uint32(p.Pid()), Status: status(state),
		Stdin: names.Stdin, Stdout: names.Stdout, Stderr: names.Stderr, Terminal: names.Terminal,
	}
	if state == task.Stopped {
		resp.ExitStatus, resp.ExitedAt = uint32(e.Status), timestamppb.New(e.At)
	}
	return resp, nil
}

func status(s task.State) taskv1.Status {
	switch s {
	case task.Created:
		return taskv1.Status_CREATED
	case task.Running:
		return taskv1.Status_RUNNING
	case task.Paused:
		return taskv1.Status_PAUSED
	case task.Stopped:
		return taskv1.Status_STOPPED
	default:
		return taskv1.Status_UNKNOWN
	}
}

// Pids lists the processes of a container.
func (s *Services) Pids(_ context.Context, r *taskapi.PidsRequest) (*taskapi.PidsResponse, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	pids, err := c.Processes().Pids()
	if err != nil {
		return nil, err
	}
	execs := map[int]string{}
	for _, p := range c.Execs() {
		execs[p.Pid()] = p.ExecID()
	}
	resp := &taskapi.PidsResponse{}
	for _, pid := range pids {
		info := &taskv1.ProcessInfo{Pid: uint32(pid)}
		if execID, ok := execs[pid]; ok {
			details := &options.ProcessDetails{ExecID: execID}
			data, err := proto.Marshal(details)
			if err != nil {
				return nil, err
			}
			info.Info = &anypb.Any{TypeUrl: string(details.ProtoReflect().Descriptor().FullName()), Value: data}
		}
		resp.Processes = append(resp.Processes, info)
	}
	return resp, nil
}

// Pause freezes a container.
func (s *Services) Pause(ctx context.Context, r *taskapi.PauseRequest) (*emptypb.Empty, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.Pause(ctx)
}

// Resume thaws a container.
func (s *Services) Resume(ctx context.Context, r *taskapi.ResumeRequest) (*emptypb.Empty, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.Resume(ctx)
}

// Checkpoint saves the state of a container's processes.
func (s *Services) Checkpoint(ctx context.Context, r *taskapi.CheckpointTaskRequest) (*emptypb.Empty, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	o := &options.CheckpointOptions{}
	if r.GetOptions().GetTypeUrl() == string(o.ProtoReflect().Descriptor().FullName()) {
		if err := proto.Unmarshal(r.GetOptions().GetValue(), o); err != nil {
			return nil, fmt.Errorf("checkpoint options: %w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	return &emptypb.Empty{}, c.Checkpoint(ctx, r.GetPath(), o)
}

// Kill sends a signal.
func (s *Services) Kill(ctx context.Context, r *taskapi.KillRequest) (*emptypb.Empty, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.Kill(ctx, r.GetExecID(), unix.Signal(r.GetSignal()), r.GetAll())
}

// ResizePty changes the size of a terminal.
func (s *Services) ResizePty(_ context.Context, r *taskapi.ResizePtyRequest) (*emptypb.Empty, error) {
	p, err := s.process(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	streams := p.Streams()
	if streams == nil {
		return nil, fmt.Errorf("process is not started: %w", errdefs.ErrFailedPrecondition)
	}
	return &emptypb.Empty{}, streams.Resize(r.GetWidth(), r.GetHeight())
}

// CloseIO closes the input of a process.
func (s *Services) CloseIO(_ context.Context, r *taskapi.CloseIORequest) (*emptypb.Empty, error) {
	p, err := s.process(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	if streams := p.Streams(); streams != nil && r.GetStdin() {
		return &emptypb.Empty{}, streams.CloseStdin()
	}
	return &emptypb.Empty{}, nil
}

// Update changes the resources of a container.
func (s *Services) Update(ctx context.Context, r *taskapi.UpdateTaskRequest) (*emptypb.Empty, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, c.Update(ctx, r.GetResources().GetValue())
}

// Wait waits for the end of a process.
func (s *Services) Wait(ctx context.Context, r *taskapi.WaitRequest) (*taskapi.WaitResponse, error) {
	p, err := s.process(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, err
	}
	e, err := p.Wait(ctx)
	if err != nil {
		return nil, err
	}
	return &taskapi.WaitResponse{ExitStatus: uint32(e.Status), ExitedAt: timestamppb.New(e.At)}, nil
}

// Stats reads the metrics of a container.
func (s *Services) Stats(_ context.Context, r *taskapi.StatsRequest) (*taskapi.StatsResponse, error) {
	c, err := s.get(r.GetID())
	if err != nil {
		return nil, err
	}
	m, err := c.Group().Metrics()
	if err != nil {
		return nil, fmt.Errorf("container %q: %w", r.GetID(), err)
	}
	return &taskapi.StatsResponse{Stats: m}, nil
}

// Connect tells the process ids of the shim and of a container, if there is one of the id.
func (s *Services) Connect(_ context.Context, r *taskapi.ConnectRequest) (*taskapi.ConnectResponse, error) {
	resp := &taskapi.ConnectResponse{ShimPid: uint32(os.Getpid()), Version: version}
	if c, err := s.get(r.GetID()); err == nil {
		resp.TaskPid = pidOf(c, "")
	}
	return resp, nil
}

// Shutdown ends the shim if nothing is left in it.
func (s *Services) Shutdown(context.Context, *taskapi.ShutdownRequest) (*emptypb.Empty, error) {
	s.tryStop()
	return &emptypb.Empty{}, nil
}
