package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	taskv1 "github.com/containerd/containerd/api/types/task"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// task serves the task service. As root its containers are real as far as it matters for who
// cleans up after them: a process in a control group, and a mounted root file system.
type task struct {
	taskv3.TTRPCTaskService

	mode string

	// mu guards the rest.
	mu         sync.Mutex
	containers map[string]*container
}

type container struct {
	bundle string
	group  string // folder of the control group; empty without one
	cmd    *exec.Cmd
	done   chan struct{}
	code   uint32
	at     time.Time
}

func newTask(mode string) *task { return &task{mode: mode, containers: map[string]*container{}} }

// dies ends the shim at once if this is how it is to behave.
func (t *task) dies(at string) {
	if t.mode == "dies-"+at {
		os.Exit(3)
	}
}

func (t *task) get(id string) (*container, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.containers[id]
	if c == nil {
		return nil, status.Errorf(codes.NotFound, "container %s", id)
	}
	return c, nil
}

func (t *task) Create(_ context.Context, r *taskv3.CreateTaskRequest) (*taskv3.CreateTaskResponse, error) {
	c := &container{bundle: r.GetBundle(), cmd: exec.Command(os.Args[0], "contained"), done: make(chan struct{})}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	c.cmd.Dir = "/"
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	if err := c.settle(r.GetID()); err != nil {
		return nil, err
	}
	t.dies("create")
	go c.follow()
	t.mu.Lock()
	t.containers[r.GetID()] = c
	t.mu.Unlock()
	return &taskv3.CreateTaskResponse{Pid: uint32(c.cmd.Process.Pid)}, nil
}

// settle puts the process where its configuration says, and mounts its root file system.
func (c *container) settle(id string) error {
	pid := strconv.Itoa(c.cmd.Process.Pid)
	err := os.WriteFile(filepath.Join(c.bundle, "init.pid"), []byte(pid), 0o600)
	if err != nil || os.Geteuid() != 0 {
		return err
	}
	data, err := os.ReadFile(filepath.Join(c.bundle, "config.json"))
	if err != nil {
		return err
	}
	var config struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return err
	}
	root := "/sys/fs/cgroup/pids"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	c.group = filepath.Join(root, config.Linux.CgroupsPath)
	return errors.Join(
		os.MkdirAll(c.group, 0o755),
		os.WriteFile(filepath.Join(c.group, "cgroup.procs"), []byte(pid), 0),
		os.MkdirAll(filepath.Join(c.bundle, "rootfs"), 0o711),
		unix.Mount("fake-"+id, filepath.Join(c.bundle, "rootfs"), "tmpfs", 0, ""),
	)
}

// follow waits for the end of the process and saves it.
func (c *container) follow() {
	_ = c.cmd.Wait()
	st, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
	c.code, c.at = uint32(c.cmd.ProcessState.ExitCode()), time.Now()
	if ok && st.Signaled() {
		c.code = 128 + uint32(st.Signal())
	}
	data, _ := json.Marshal(map[string]any{"Pid": c.cmd.Process.Pid, "Status": c.code, "Timestamp": c.at})
	_ = os.WriteFile(filepath.Join(c.bundle, "exit.json"), data, 0o600)
	close(c.done)
}

func (t *task) Start(_ context.Context, r *taskv3.StartRequest) (*taskv3.StartResponse, error) {
	c, err := t.get(r.GetID())
	if err != nil {
		return nil, err
	}
	t.dies("start")
	return &taskv3.StartResponse{Pid: uint32(c.cmd.Process.Pid)}, nil
}

func (t *task) Exec(context.Context, *taskv3.ExecProcessRequest) (*emptypb.Empty, error) {
	t.dies("exec")
	return &emptypb.Empty{}, nil
}

func (t *task) Kill(_ context.Context, r *taskv3.KillRequest) (*emptypb.Empty, error) {
	c, err := t.get(r.GetID())
	if err != nil {
		return nil, err
	}
	t.dies("kill")
	return &emptypb.Empty{}, c.cmd.Process.Signal(syscall.Signal(r.GetSignal()))
}

func (t *task) Wait(ctx context.Context, r *taskv3.WaitRequest) (*taskv3.WaitResponse, error) {
	c, err := t.get(r.GetID())
	if err != nil {
		return nil, err
	}
	select {
	case <-c.done:
		return &taskv3.WaitResponse{ExitStatus: c.code, ExitedAt: timestamppb.New(c.at)}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (t *task) State(_ context.Context, r *taskv3.StateRequest) (*taskv3.StateResponse, error) {
	c, err := t.get(r.GetID())
	if err != nil {
		return nil, err
	}
	resp := &taskv3.StateResponse{ID: r.GetID(), Pid: uint32(c.cmd.Process.Pid), Status: taskv1.Status_RUNNING}
	select {
	case <-c.done:
		resp.Status, resp.ExitStatus, resp.ExitedAt = taskv1.Status_STOPPED, c.code, timestamppb.New(c.at)
	default:
	}
	return resp, nil
}

func (t *task) Delete(_ context.Context, r *taskv3.DeleteRequest) (*taskv3.DeleteResponse, error) {
	c, err := t.get(r.GetID())
	if err != nil {
		return nil, err
	}
	t.dies("delete")
	select {
	case <-c.done:
	default:
		return nil, status.Error(codes.FailedPrecondition, "container is running")
	}
	if c.group != "" {
		_ = unix.Unmount(filepath.Join(c.bundle, "rootfs"), unix.MNT_DETACH)
		_ = os.Remove(c.group)
	}
	t.mu.Lock()
	delete(t.containers, r.GetID())
	t.mu.Unlock()
	return &taskv3.DeleteResponse{Pid: uint32(c.cmd.Process.Pid), ExitStatus: c.code, ExitedAt: timestamppb.New(c.at)}, nil
}

// Checkpoint notes what it was asked for.
func (t *task) Checkpoint(_ context.Context, r *taskv3.CheckpointTaskRequest) (*emptypb.Empty, error) {
	if _, err := t.get(r.GetID()); err != nil {
		return nil, err
	}
	return &emptypb.Empty{}, os.WriteFile(r.GetPath(), []byte(r.GetOptions().GetTypeUrl()), 0o600)
}

func (t *task) Connect(context.Context, *taskv3.ConnectRequest) (*taskv3.ConnectResponse, error) {
	return &taskv3.ConnectResponse{ShimPid: uint32(os.Getpid())}, nil
}

func (t *task) Shutdown(context.Context, *taskv3.ShutdownRequest) (*emptypb.Empty, error) {
	exitSoon()
	return &emptypb.Empty{}, nil
}

// grpcTask serves the same over gRPC, as far as tests need it.
type grpcTask struct {
	taskv3.UnimplementedTaskServer

	*onlyTask
}

// onlyTask hides that both of grpcTask's parts have all methods.
type onlyTask struct{ t *task }

func (g grpcTask) Connect(ctx context.Context, r *taskv3.ConnectRequest) (*taskv3.ConnectResponse, error) {
	return g.t.Connect(ctx, r)
}

func (g grpcTask) Shutdown(ctx context.Context, r *taskv3.ShutdownRequest) (*emptypb.Empty, error) {
	return g.t.Shutdown(ctx, r)
}

func (g grpcTask) Create(ctx context.Context, r *taskv3.CreateTaskRequest) (*taskv3.CreateTaskResponse, error) {
	return g.t.Create(ctx, r)
}

func (g grpcTask) Kill(ctx context.Context, r *taskv3.KillRequest) (*emptypb.Empty, error) {
	return g.t.Kill(ctx, r)
}

func (g grpcTask) Wait(ctx context.Context, r *taskv3.WaitRequest) (*taskv3.WaitResponse, error) {
	return g.t.Wait(ctx, r)
}

func (g grpcTask) Delete(ctx context.Context, r *taskv3.DeleteRequest) (*taskv3.DeleteResponse, error) {
	return g.t.Delete(ctx, r)
}

func (g grpcTask) Checkpoint(ctx context.Context, r *taskv3.CheckpointTaskRequest) (*emptypb.Empty, error) {
	return g.t.Checkpoint(ctx, r)
}
