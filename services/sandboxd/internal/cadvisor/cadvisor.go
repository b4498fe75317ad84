// Package cadvisor answers the three questions that kubelet's built-in cAdvisor puts to
// containerd: its version, a container by its id, and the task of a container.
//
// cAdvisor finds containers by their cgroups and asks one of two runtimes at fixed sockets what
// they are; without an answer its figures carry no names of pods and containers. The services
// have containerd's API types; every other method is unimplemented. It changes nothing and
// reads only what the engine shows.
package cadvisor

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// namespaceHeader is where containerd's clients say which namespace they mean.
	namespaceHeader = "containerd-namespace"
	// kindLabel tells containers from sandboxes; cAdvisor reads the network only of the latter.
	kindLabel = "io.cri-containerd.kind"
	// specURL is the type URL by which containerd's clients decode a specification in JSON.
	specURL = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
)

// Records are what the engine shows. A record must not be changed.
type Records interface {
	// Known is closed once Sandbox and Container answer from a complete state.
	Known() <-chan struct{}
	// Sandbox finds a sandbox, also one that is being made: its first process has a cgroup
	// before the sandbox is shown. Errors: ErrNotFound.
	Sandbox(id string) (*recordv1.Sandbox, error)
	// Container finds a visible container. Errors: ErrNotFound.
	Container(id string) (*recordv1.Container, error)
	// Sandboxes are the visible sandboxes.
	Sandboxes() ([]*recordv1.Sandbox, error)
	// Containers are the visible containers of a sandbox, or of all if none is given, oldest
	// first.
	Containers(sandboxID string) ([]*recordv1.Container, error)
	// RuntimeType is the type of a sandbox's shim.
	RuntimeType(sandboxID string) string
	// CgroupsPath is the cgroup of a sandbox's own process, as a specification has it,
	// whether there is such a process or not.
	CgroupsPath(*recordv1.Sandbox) string
}

// Services are the services for an rpc.Server. Version answers at once, the others once the
// state is complete, or with the error of the caller's context: cAdvisor asks once per cgroup
// and takes an error for the answer.
func Services(records Records, version, revision string) []rpc.Registration {
	return []rpc.Registration{
		rpc.Service(&versionapi.Version_ServiceDesc, versions{version: version, revision: revision}),
		rpc.Service(&containersapi.Containers_ServiceDesc, containers{records: records}),
		rpc.Service(&tasksapi.Tasks_ServiceDesc, tasks{records: records}),
	}
}

type versions struct {
	versionapi.UnimplementedVersionServer

	version, revision string
}

// Version implements the call that cAdvisor makes once, when kubelet starts.
func (v versions) Version(context.Context, *emptypb.Empty) (*versionapi.VersionResponse, error) {
	return &versionapi.VersionResponse{Version: v.version, Revision: v.revision}, nil
}

type containers struct {
	containersapi.UnimplementedContainersServer

	records Records
}

// Get describes a container or a sandbox.
func (c containers) Get(ctx context.Context, req *containersapi.GetContainerRequest) (*containersapi.GetContainerResponse, error) {
	about, err := find(ctx, c.records, req.GetID())
	if err != nil {
		return nil, err
	}
	if about.container != nil {
		return &containersapi.GetContainerResponse{Container: c.container(about.container)}, nil
	}
	described, err := c.sandbox(about.sandbox)
	if err != nil {
		return nil, err
	}
	return &containersapi.GetContainerResponse{Container: described}, nil
}

func (c containers) container(rec *recordv1.Container) *containersapi.Container {
	return &containersapi.Container{
		ID: rec.GetId(), Labels: labels(rec.GetConfig().GetLabels(), "container"), Image: imageName(rec),
		Runtime:   &containersapi.Container_Runtime{Name: c.records.RuntimeType(rec.GetSandboxId())},
		Spec:      &anypb.Any{TypeUrl: specURL, Value: rec.GetSpec()},
		CreatedAt: rec.GetCreatedAt(), UpdatedAt: rec.GetCreatedAt(), Sandbox: rec.GetSandboxId(),
	}
}

// sandbox describes a sandbox. Its specification says only what there is without an init
// process too, with the parts that clients take for granted.
func (c containers) sandbox(rec *recordv1.Sandbox) (*containersapi.Container, error) {
	spec := &specs.Spec{
		Version: specs.Version, Hostname: rec.GetConfig().GetHostname(), Annotations: rec.GetConfig().GetAnnotations(),
		Process: &specs.Process{}, Root: &specs.Root{}, Linux: &specs.Linux{},
	}
	if rec.GetPid() != 0 {
		spec.Linux.CgroupsPath = c.records.CgroupsPath(rec)
	}
	encoded, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("sandbox %q: specification: %w", rec.GetId(), err)
	}
	return &containersapi.Container{
		ID: rec.GetId(), Labels: labels(rec.GetConfig().GetLabels(), "sandbox"),
		Runtime:   &containersapi.Container_Runtime{Name: c.records.RuntimeType(rec.GetId())},
		Spec:      &anypb.Any{TypeUrl: specURL, Value: encoded},
		CreatedAt: rec.GetCreatedAt(), UpdatedAt: rec.GetCreatedAt(), Sandbox: rec.GetId(),
	}, nil
}

// labels are kubelet's labels with the kind.
func labels(of map[string]string, kind string) map[string]string {
	out := make(map[string]string, len(of)+1)
	maps.Copy(out, of)
	out[kindLabel] = kind
	return out
}

// imageName is the image as the pod names it, or else what it was resolved to.
func imageName(rec *recordv1.Container) string {
	if name := rec.GetConfig().GetImage().GetUserSpecifiedImage(); name != "" {
		return name
	}
	return rec.GetImageRef()
}

type tasks struct {
	tasksapi.UnimplementedTasksServer

	records Records
}

// Get tells the first process of a container that has one, or a process in the namespaces of a
// sandbox. Errors: ErrNotFound if there is no process, or if one of an exec is asked for.
func (t tasks) Get(ctx context.Context, req *tasksapi.GetRequest) (*tasksapi.GetResponse, error) {
	id := req.GetContainerID()
	about, err := find(ctx, t.records, id)
	if err != nil {
		return nil, err
	}
	if req.GetExecID() != "" {
		return nil, fmt.Errorf("exec %q of container %q: %w", req.GetExecID(), id, errdefs.ErrNotFound)
	}
	var pid uint32
	if about.container != nil {
		pid = running(about.container)
	} else {
		pid, err = t.insideOf(about.sandbox)
	}
	if err != nil {
		return nil, err
	}
	if pid == 0 {
		return nil, fmt.Errorf("process of %q: %w", id, errdefs.ErrNotFound)
	}
	return &tasksapi.GetResponse{Process: &tasktypes.Process{ID: id, ContainerID: id, Pid: pid, Status: tasktypes.Status_RUNNING}}, nil
}

// insideOf is a process in the namespaces of a sandbox: its init process or the first process
// of its oldest running container; 0 if there is none.
func (t tasks) insideOf(rec *recordv1.Sandbox) (uint32, error) {
	if ended(rec) {
		return 0, nil
	}
	if rec.GetPid() != 0 {
		return rec.GetPid(), nil
	}
	list, err := t.records.Containers(rec.GetId())
	if err != nil {
		return 0, err
	}
	return oldest(list), nil
}

func ended(rec *recordv1.Sandbox) bool {
	return rec.GetExitedAt() != nil || rec.GetState() == recordv1.SandboxState_SANDBOX_STATE_STOPPED
}

// oldest is the first process of the oldest container that runs; 0 if none does.
func oldest(list []*recordv1.Container) uint32 {
	for _, c := range list {
		if pid := running(c); pid != 0 {
			return pid
		}
	}
	return 0
}

// running is the first process of a container; 0 if it does not run.
func running(rec *recordv1.Container) uint32 {
	if rec.GetState() != recordv1.ContainerState_CONTAINER_STATE_RUNNING {
		return 0
	}
	return rec.GetPid()
}

// subject is a container or a sandbox; one of them is set.
type subject struct {
	container *recordv1.Container
	sandbox   *recordv1.Sandbox
}

// find waits for the complete state and finds what an id belongs to in the caller's namespace.
func find(ctx context.Context, records Records, id string) (subject, error) {
	names := metadata.ValueFromIncomingContext(ctx, namespaceHeader)
	if len(names) != 1 || names[0] == "" {
		return subject{}, fmt.Errorf("metadata: %s must name one namespace, such as %q: %w", namespaceHeader, pod.Namespace, errdefs.ErrInvalidArgument)
	}
	if id == "" {
		return subject{}, fmt.Errorf("id: must not be empty: %w", errdefs.ErrInvalidArgument)
	}
	if names[0] != pod.Namespace {
		return subject{}, fmt.Errorf("container %q in namespace %q: %w", id, names[0], errdefs.ErrNotFound)
	}
	select {
	case <-records.Known():
	case <-ctx.Done():
		return subject{}, fmt.Errorf("container %q: sandboxd is still recovering its state: %w", id, ctx.Err())
	}
	container, err := records.Container(id)
	if err == nil {
		return subject{container: container}, nil
	}
	if !errdefs.IsNotFound(err) {
		return subject{}, err
	}
	sandbox, err := records.Sandbox(id)
	if errdefs.IsNotFound(err) {
		return subject{}, fmt.Errorf("container %q in namespace %q: %w", id, names[0], errdefs.ErrNotFound)
	}
	return subject{sandbox: sandbox}, err
}
