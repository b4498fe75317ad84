package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	taskv1 "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	runtimespec "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
)

// Types of JSON documents in messages of the shim API.
const (
	typeProcess   = "types.containerd.io/opencontainers/runtime-spec/1/Process"
	typeSpec      = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
	typeResources = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources"
)

// Tasks drives the processes of containers through the shims of their sandboxes.
type Tasks struct {
	shims *shim.Manager
}

// NewTasks returns the driver of the processes in the manager's shims.
func NewTasks(shims *shim.Manager) *Tasks { return &Tasks{shims: shims} }

// Create makes the container's bundle and lets the shim create its first process, which
// does not run yet. If it fails nothing is left.
func (t *Tasks) Create(ctx context.Context, spec port.TaskSpec) (uint32, error) {
	i, err := t.shims.Get(spec.SandboxID)
	if err != nil {
		return 0, err
	}
	options, err := command.Options(spec.Handler)
	if err != nil {
		return 0, err
	}
	dir, err := i.Bundle().CreateContainer(spec.ContainerID, spec.Spec)
	if err != nil {
		return 0, err
	}
	pid, err := t.create(ctx, i, dir, spec, options)
	if err != nil {
		return 0, errors.Join(fmt.Errorf("create task %q: %w", spec.ContainerID, err), t.undo(ctx, i, spec.ContainerID))
	}
	return pid, nil
}

func (t *Tasks) create(ctx context.Context, i *shim.Instance, dir string, spec port.TaskSpec, options *anypb.Any) (uint32, error) {
	req := &taskapi.CreateTaskRequest{
		ID:       spec.ContainerID,
		Bundle:   dir,
		Terminal: spec.Stdio.Terminal,
		Stdin:    spec.Stdio.Stdin,
		Stdout:   spec.Stdio.Stdout,
		Stderr:   spec.Stdio.Stderr,
		Options:  options,

		Checkpoint: spec.Checkpoint,
	}
	for _, m := range spec.Rootfs {
		req.Rootfs = append(req.Rootfs, &types.Mount{Type: m.Type, Source: m.Source, Target: m.Target, Options: m.Options})
	}
	limit := t.shims.CreateLimit()
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var resp taskapi.CreateTaskResponse
	err := i.Task(within, "Create", req, &resp)
	if err != nil && within.Err() != nil && ctx.Err() == nil {
		return 0, fmt.Errorf("the OCI runtime has not created it within %v (runtime.shim.create_timeout): %w", limit, context.DeadlineExceeded)
	}
	if err != nil {
		return 0, explained(err, "")
	}
	return resp.GetPid(), nil
}

// undo removes what a failed creation left, in the shim and outside of it.
func (t *Tasks) undo(ctx context.Context, i *shim.Instance, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	done, err := i.TakeRemoval(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	// After an error of the shim there is no task; after the end of ctx there may be one.
	err = i.Task(ctx, "Kill", &taskapi.KillRequest{ID: id, Signal: uint32(syscall.SIGKILL), All: true}, &emptypb.Empty{})
	if err == nil {
		_ = i.Task(ctx, "Wait", &taskapi.WaitRequest{ID: id}, &taskapi.WaitResponse{})
		_ = i.Task(ctx, "Delete", &taskapi.DeleteRequest{ID: id}, &taskapi.DeleteResponse{})
	}
	_, err = i.Discard(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Start runs a created process. When it returns a first process is the container's program,
// as far as that can be seen from here, and no longer the OCI runtime's.
func (t *Tasks) Start(ctx context.Context, sandboxID, containerID, execID string) (uint32, error) {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return 0, err
	}
	var resp taskapi.StartResponse
	before := programOf(pidOf(i, containerID, execID))
	if err := i.Task(ctx, "Start", &taskapi.StartRequest{ID: containerID, ExecID: execID}, &resp); err != nil {
		return 0, named(containerID, execID, explained(err, execID))
	}
	if execID == "" {
		awaitProgram(ctx, resp.GetPid(), before)
	}
	return resp.GetPid(), nil
}

// Exec prepares a further process in a running container.
func (t *Tasks) Exec(ctx context.Context, sandboxID, containerID string, spec port.ExecSpec) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	process, err := json.Marshal(spec.Process)
	if err != nil {
		return fmt.Errorf("exec %q: %w: %w", spec.ID, err, errdefs.ErrInvalidArgument)
	}
	req := &taskapi.ExecProcessRequest{
		ID:       containerID,
		ExecID:   spec.ID,
		Terminal: spec.Stdio.Terminal,
		Stdin:    spec.Stdio.Stdin,
		Stdout:   spec.Stdio.Stdout,
		Stderr:   spec.Stdio.Stderr,
		Spec:     &anypb.Any{TypeUrl: typeProcess, Value: process},
	}
	return named(containerID, spec.ID, i.Task(ctx, "Exec", req, &emptypb.Empty{}))
}

// Kill sends a signal. With all it reaches every process of the container, and SIGKILL is
// then sent without the shim if that does not answer or cannot do it. With SIGKILL for an exec our
// shim kills its process group, others its first process only.
func (t *Tasks) Kill(ctx context.Context, sandboxID, containerID, execID string, sig syscall.Signal, all bool) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	req := &taskapi.KillRequest{ID: containerID, ExecID: execID, Signal: uint32(sig), All: all}
	force := all && execID == "" && sig == syscall.SIGKILL
	asked, cancel := ctx, context.CancelFunc(func() {})
	if force {
		// A shim may take for dead what the signal has reached, but what is frozen does not die.
		i.Thaw(containerID)
		asked, cancel = context.WithTimeout(ctx, killTimeout)
	}
	err = i.Task(asked, "Kill", req, &emptypb.Empty{})
	cancel()
	if err == nil {
		return nil
	}
	over := errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err)
	if force && !over {
		kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
		defer cancel()
		if killErr := i.KillAll(kctx, containerID); killErr != nil {
			return named(containerID, execID, errors.Join(err, killErr))
		}
		return nil
	}
	return named(containerID, execID, err)
}

// State asks for the state of a process. Of a dead shim's container it is what the clean-up
// found out.
func (t *Tasks) State(ctx context.Context, sandboxID, containerID, execID string) (port.TaskState, error) {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return port.TaskState{}, err
	}
	var resp taskapi.StateResponse
	err = i.Task(ctx, "State", &taskapi.StateRequest{ID: containerID, ExecID: execID}, &resp)
	if err != nil {
		if e, ok := i.Exit(containerID); ok && execID == "" {
			return port.TaskState{Status: statusStopped, Pid: e.Pid, Exit: e}, nil
		}
		return port.TaskState{}, named(containerID, execID, err)
	}
	st := port.TaskState{
		Status: strings.ToLower(taskv1.Status_name[int32(resp.GetStatus())]),
		Pid:    resp.GetPid(),
	}
	if resp.GetStatus() == taskv1.Status_STOPPED {
		st.Exit = pod.Exit{Pid: resp.GetPid(), Code: resp.GetExitStatus(), At: timeOf(resp.GetExitedAt())}
	}
	return st, nil
}

// Pids lists the processes of a container.
func (t *Tasks) Pids(ctx context.Context, sandboxID, containerID string) ([]uint32, error) {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return nil, err
	}
	var resp taskapi.PidsResponse
	if err := i.Task(ctx, "Pids", &taskapi.PidsRequest{ID: containerID}, &resp); err != nil {
		return nil, named(containerID, "", err)
	}
	pids := make([]uint32, 0, len(resp.GetProcesses()))
	for _, p := range resp.GetProcesses() {
		pids = append(pids, p.GetPid())
	}
	return pids, nil
}

// ResizePty changes the size of a process's terminal.
func (t *Tasks) ResizePty(ctx context.Context, sandboxID, containerID, execID string, size pod.TerminalSize) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	req := &taskapi.ResizePtyRequest{ID: containerID, ExecID: execID, Width: size.Width, Height: size.Height}
	return named(containerID, execID, i.Task(ctx, "ResizePty", req, &emptypb.Empty{}))
}

// CloseIO lets a process see the end of its standard input once all of it is read.
func (t *Tasks) CloseIO(ctx context.Context, sandboxID, containerID, execID string) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	req := &taskapi.CloseIORequest{ID: containerID, ExecID: execID, Stdin: true}
	return named(containerID, execID, i.Task(ctx, "CloseIO", req, &emptypb.Empty{}))
}

// Update changes the resources of a container.
func (t *Tasks) Update(ctx context.Context, sandboxID, containerID string, resources *runtimespec.LinuxResources, annotations map[string]string) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	if resources == nil {
		resources = &runtimespec.LinuxResources{} // changes none
	}
	encoded, err := json.Marshal(resources)
	if err != nil {
		return fmt.Errorf("resources of container %q: %w: %w", containerID, err, errdefs.ErrInvalidArgument)
	}
	req := &taskapi.UpdateTaskRequest{
		ID:          containerID,
		Resources:   &anypb.Any{TypeUrl: typeResources, Value: encoded},
		Annotations: annotations,
	}
	return named(containerID, "", explained(i.Task(ctx, "Update", req, &emptypb.Empty{}), ""))
}

// Stats asks for the metrics of a container's control group.
func (t *Tasks) Stats(ctx context.Context, sandboxID, containerID string) (*anypb.Any, error) {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return nil, err
	}
	var resp taskapi.StatsResponse
	if err := i.Task(ctx, "Stats", &taskapi.StatsRequest{ID: containerID}, &resp); err != nil {
		return nil, named(containerID, "", err)
	}
	return resp.GetStats(), nil
}

// Pause freezes a container.
func (t *Tasks) Pause(ctx context.Context, sandboxID, containerID string) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	return named(containerID, "", i.Task(ctx, "Pause", &taskapi.PauseRequest{ID: containerID}, &emptypb.Empty{}))
}

// Resume thaws a container.
func (t *Tasks) Resume(ctx context.Context, sandboxID, containerID string) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	return named(containerID, "", i.Task(ctx, "Resume", &taskapi.ResumeRequest{ID: containerID}, &emptypb.Empty{}))
}

// Checkpoint writes the state of a container's processes into a folder.
func (t *Tasks) Checkpoint(ctx context.Context, sandboxID, containerID string, spec port.CheckpointSpec) error {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return err
	}
	if !filepath.IsAbs(spec.ImagePath) {
		return named(containerID, "", fmt.Errorf("folder %q of the checkpoint is not absolute: %w", spec.ImagePath, errdefs.ErrInvalidArgument))
	}
	options, err := checkpointOptions(i.Meta().RuntimeType, spec)
	if err != nil {
		return named(containerID, "", err)
	}
	req := &taskapi.CheckpointTaskRequest{ID: containerID, Path: spec.ImagePath, Options: options}
	return named(containerID, "", i.Task(ctx, "Checkpoint", req, &emptypb.Empty{}))
}

// checkpointOptions encodes the options of a checkpoint for a type of shim. The shim protocol
// has no form of them that all shims know.
func checkpointOptions(runtimeType string, spec port.CheckpointSpec) (*anypb.Any, error) {
	if command.TakesRuncOptions(runtimeType) {
		return typeurl.MarshalAnyToProto(&runcoptions.CheckpointOptions{
			Exit: spec.Exit, OpenTcp: spec.OpenTCP, ExternalUnixSockets: spec.ExternalUnixSockets,
			Terminal: spec.Terminal, FileLocks: spec.FileLocks, ImagePath: spec.ImagePath, WorkPath: spec.WorkPath,
		})
	}
	if (spec != port.CheckpointSpec{ImagePath: spec.ImagePath}) {
		return nil, fmt.Errorf("checkpoint options for a shim of type %q: %w", runtimeType, errdefs.ErrNotImplemented)
	}
	return nil, nil
}

// ping asks the shim whether it answers.
func (t *Tasks) ping(ctx context.Context, i *shim.Instance) error {
	err := i.Task(ctx, "Connect", &taskapi.ConnectRequest{ID: i.ID()}, &taskapi.ConnectResponse{})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// named adds to an error which process it is about.
func named(containerID, execID string, err error) error {
	switch {
	case err == nil:
		return nil
	case execID == "":
		return fmt.Errorf("container %q: %w", containerID, err)
	default:
		return fmt.Errorf("exec %q of container %q: %w", execID, containerID, err)
	}
}

func timeOf(ts *timestamppb.Timestamp) time.Time {
	if ts == nil {
		return time.Time{}
	}
	return ts.AsTime()
}

// pidOf is the process id that the OCI runtime noted for a process.
func pidOf(i *shim.Instance, containerID, execID string) uint32 {
	return bundle.ReadPid(i.Bundle().ContainerDir(containerID), execID)
}
