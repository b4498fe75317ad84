package cadvisor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/cadvisor"
)

const (
	ready   = recordv1.SandboxState_SANDBOX_STATE_READY
	created = recordv1.ContainerState_CONTAINER_STATE_CREATED
	running = recordv1.ContainerState_CONTAINER_STATE_RUNNING
	exited  = recordv1.ContainerState_CONTAINER_STATE_EXITED
)

// records is what an engine would show.
type records struct {
	known      chan struct{}
	sandboxes  map[string]*recordv1.Sandbox
	containers []*recordv1.Container
}

func (r records) Known() <-chan struct{} { return r.known }

func (r records) Sandbox(id string) (*recordv1.Sandbox, error) {
	if s, ok := r.sandboxes[id]; ok {
		return s, nil
	}
	return nil, fmt.Errorf("sandbox %q: %w", id, errdefs.ErrNotFound)
}

func (r records) Container(id string) (*recordv1.Container, error) {
	for _, c := range r.containers {
		if c.GetId() == id {
			return c, nil
		}
	}
	return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
}

func (r records) Containers(sandboxID string) ([]*recordv1.Container, error) {
	var out []*recordv1.Container
	for _, c := range r.containers {
		if sandboxID == "" || c.GetSandboxId() == sandboxID {
			out = append(out, c)
		}
	}
	return out, nil
}

func (r records) Sandboxes() ([]*recordv1.Sandbox, error) {
	return slices.Collect(maps.Values(r.sandboxes)), nil
}

func (records) RuntimeType(string) string { return "io.containerd.crisp.v1" }

func (records) CgroupsPath(s *recordv1.Sandbox) string { return "/pods/" + s.GetId() }

func sandbox(id string, pid uint32, state recordv1.SandboxState) *recordv1.Sandbox {
	return &recordv1.Sandbox{
		Id: id, Pid: pid, State: state, CreatedAt: timestamppb.New(time.Unix(1000, 0)),
		Config: &criv1.PodSandboxConfig{Hostname: "h", Labels: map[string]string{"io.kubernetes.pod.name": id}},
	}
}

func container(id, sandboxID string, pid uint32, state recordv1.ContainerState) *recordv1.Container {
	return &recordv1.Container{
		Id: id, SandboxId: sandboxID, Pid: pid, State: state, CreatedAt: timestamppb.New(time.Unix(2000, 0)),
		Config: &criv1.ContainerConfig{
			Labels: map[string]string{"io.kubernetes.container.name": id},
			Image:  &criv1.ImageSpec{UserSpecifiedImage: "registry/" + id + ":1"},
		},
		ImageRef: "registry/" + id + "@sha256:1", Spec: []byte(`{"linux":{"cgroupsPath":"/pods/` + id + `"}}`),
	}
}

func world() records {
	r := records{
		known: make(chan struct{}),
		sandboxes: map[string]*recordv1.Sandbox{
			"plain": sandbox("plain", 0, ready), "init": sandbox("init", 70, ready), "empty": sandbox("empty", 0, ready),
			"making":  sandbox("making", 80, recordv1.SandboxState_SANDBOX_STATE_PREPARING),
			"stopped": sandbox("stopped", 90, recordv1.SandboxState_SANDBOX_STATE_STOPPED),
		},
		containers: []*recordv1.Container{
			container("gone", "plain", 10, exited), container("made", "plain", 0, created), container("works", "plain", 12, running),
		},
	}
	return r
}

// serve serves r at a socket and gives a connection to it.
func serve(t *testing.T, r records) (*grpc.ClientConn, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c.sock")
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "sandboxd", Log: telemetry.DefaultLogConfig(), Trace: telemetry.DefaultTraceConfig()}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	server, err := rpc.NewServer(rpc.DefaultServerConfig(path), tel, cadvisor.Services(r, "v1", "abc")...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served, ready := make(chan error, 1), make(chan struct{})
	go func() { served <- server.Part("cadvisor").Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-served:
		stop()
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("socket after the stop: %v", err)
		}
	})
	return conn, path
}

func in(t *testing.T, namespace string) context.Context {
	t.Helper()
	return metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", namespace)
}

func wantCode(t *testing.T, what string, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

func TestContainersAndSandboxesAreDescribed(t *testing.T) {
	t.Parallel()
	r := world()
	close(r.known)
	conn, path := serve(t, r)
	client := containersapi.NewContainersClient(conn)
	for id, want := range map[string]struct {
		labels        map[string]string
		image, cgroup string
		created       int64
	}{
		"works":  {map[string]string{"io.kubernetes.container.name": "works", "io.cri-containerd.kind": "container"}, "registry/works:1", "/pods/works", 2000},
		"plain":  {map[string]string{"io.kubernetes.pod.name": "plain", "io.cri-containerd.kind": "sandbox"}, "", "", 1000},
		"init":   {map[string]string{"io.kubernetes.pod.name": "init", "io.cri-containerd.kind": "sandbox"}, "", "/pods/init", 1000},
		"making": {map[string]string{"io.kubernetes.pod.name": "making", "io.cri-containerd.kind": "sandbox"}, "", "/pods/making", 1000},
	} {
		answer, err := client.Get(in(t, "k8s.io"), &containersapi.GetContainerRequest{ID: id})
		if err != nil {
			t.Errorf("%s: %v", id, err)
			continue
		}
		got := answer.GetContainer()
		spec := specs.Spec{}
		if err := json.Unmarshal(got.GetSpec().GetValue(), &spec); err != nil || spec.Linux == nil || spec.Linux.CgroupsPath != want.cgroup {
			t.Errorf("%s: specification %s, %v", id, got.GetSpec().GetValue(), err)
		}
		if got.GetID() != id || !maps.Equal(got.GetLabels(), want.labels) || got.GetImage() != want.image ||
			got.GetCreatedAt().GetSeconds() != want.created || got.GetRuntime().GetName() != "io.containerd.crisp.v1" ||
			got.GetSpec().GetTypeUrl() != "types.containerd.io/opencontainers/runtime-spec/1/Spec" {
			t.Errorf("%s: got %v", id, got)
		}
	}
	if kept := r.containers[2].GetConfig().GetLabels(); len(kept) != 1 {
		t.Errorf("the record was changed: labels %v", kept)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", info, err)
	}
}

func TestTasksTellProcesses(t *testing.T) {
	t.Parallel()
	r := world()
	close(r.known)
	conn, _ := serve(t, r)
	client := tasksapi.NewTasksClient(conn)
	for id, pid := range map[string]uint32{"works": 12, "plain": 12, "init": 70, "making": 80} {
		answer, err := client.Get(in(t, "k8s.io"), &tasksapi.GetRequest{ContainerID: id})
		if p := answer.GetProcess(); err != nil || p.GetPid() != pid || p.GetStatus() != tasktypes.Status_RUNNING || p.GetContainerID() != id {
			t.Errorf("%s: got %v, %v, want process %d", id, p, err, pid)
		}
	}
	for _, id := range []string{"gone", "made", "empty", "stopped", "unknown"} {
		_, err := client.Get(in(t, "k8s.io"), &tasksapi.GetRequest{ContainerID: id})
		wantCode(t, id, err, codes.NotFound)
	}
	_, err := client.Get(in(t, "k8s.io"), &tasksapi.GetRequest{ContainerID: "works", ExecID: "e"})
	wantCode(t, "exec", err, codes.NotFound)
}

func TestWhatIsNotAnswered(t *testing.T) {
	t.Parallel()
	r := world()
	close(r.known)
	conn, _ := serve(t, r)
	containers, tasks := containersapi.NewContainersClient(conn), tasksapi.NewTasksClient(conn)
	for _, c := range []struct {
		namespace, id string
		want          codes.Code
	}{
		{"k8s.io", "unknown", codes.NotFound},
		{"moby", "works", codes.NotFound},
		{"moby", "plain", codes.NotFound},
		{"", "works", codes.InvalidArgument},
		{"k8s.io", "", codes.InvalidArgument},
	} {
		_, err := containers.Get(in(t, c.namespace), &containersapi.GetContainerRequest{ID: c.id})
		wantCode(t, fmt.Sprintf("container %q in %q", c.id, c.namespace), err, c.want)
		_, err = tasks.Get(in(t, c.namespace), &tasksapi.GetRequest{ContainerID: c.id})
		wantCode(t, fmt.Sprintf("task %q in %q", c.id, c.namespace), err, c.want)
	}
	_, err := containers.Get(t.Context(), &containersapi.GetContainerRequest{ID: "works"})
	wantCode(t, "no namespace", err, codes.InvalidArgument)
	_, err = containers.List(in(t, "k8s.io"), &containersapi.ListContainersRequest{})
	wantCode(t, "list", err, codes.Unimplemented)
	_, err = containers.Delete(in(t, "k8s.io"), &containersapi.DeleteContainerRequest{ID: "works"})
	wantCode(t, "delete", err, codes.Unimplemented)
	_, err = tasks.Kill(in(t, "k8s.io"), &tasksapi.KillRequest{ContainerID: "works", Signal: 9})
	wantCode(t, "kill", err, codes.Unimplemented)
}

func TestAnswersWaitForTheCompleteState(t *testing.T) {
	t.Parallel()
	r := world()
	conn, _ := serve(t, r)
	version, err := versionapi.NewVersionClient(conn).Version(t.Context(), &emptypb.Empty{})
	if err != nil || version.GetVersion() != "v1" || version.GetRevision() != "abc" {
		t.Errorf("version %v, %v", version, err)
	}
	containers := containersapi.NewContainersClient(conn)
	short, cancel := context.WithTimeout(in(t, "k8s.io"), 200*time.Millisecond)
	defer cancel()
	_, err = containers.Get(short, &containersapi.GetContainerRequest{ID: "works"})
	wantCode(t, "before", err, codes.DeadlineExceeded)
	answered := make(chan error, 1)
	go func() {
		_, err := containers.Get(in(t, "k8s.io"), &containersapi.GetContainerRequest{ID: "works"})
		answered <- err
	}()
	close(r.known)
	if err := <-answered; err != nil {
		t.Error(err)
	}
}
