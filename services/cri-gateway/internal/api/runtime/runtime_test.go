package runtime_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/api/image"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/api/runtime"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/backendtest"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/containerevents"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/sequence"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type silent struct{}

func (silent) Begin(string) func(error) { return func(error) {} }
func (silent) Join(string)              {}

// urls answers with what it was asked.
type urls struct{}

func (urls) ExecURL(req *criv1.ExecRequest) (string, error) {
	return "exec:" + req.GetContainerId(), nil
}

func (urls) AttachURL(req *criv1.AttachRequest, _, _ bool) (string, error) {
	return "attach:" + req.GetContainerId(), nil
}

func (urls) PortForwardURL(req *criv1.PortForwardRequest) (string, error) {
	return "forward:" + req.GetPodSandboxId(), nil
}

// self is able to do everything.
type self struct{}

func (self) Able(context.Context) error { return nil }

func (self) Plugins(context.Context) (enabled bool, degraded, missing []string, failure error) {
	return true, nil, []string{"guard"}, nil
}

func (self) Info(context.Context) map[string]any { return map[string]any{"cri-gateway": "well"} }

type bench struct {
	criv1.RuntimeServiceClient
	images   criv1.ImageServiceClient
	sandboxd *backendtest.Sandboxd
}

func newBench(t *testing.T) *bench {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	log := slog.New(slog.DiscardHandler)
	stand := backendtest.NewSandboxd(&backendtest.Journal{})
	sandboxd := backend.NewSandboxd(testkit.GRPC(t, tel, stand.Registrations()...), testkit.Patience)
	session := backend.NewSession(sandboxd.Node, testkit.Patience, log)
	ops := operation.New(log, silent{})
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = session.Run(ctx) })
	t.Cleanup(func() {
		if err := ops.Close(context.Background(), testkit.Patience); err != nil {
			t.Error(err)
		}
		cancel()
		tasks.Wait()
	})
	sequences := sequence.New(sequence.Parts{
		Sandboxes: sandboxd.Sandboxes, Containers: sandboxd.Containers, Node: sandboxd.Node, Session: session,
		Hub: backend.NoHub{}, Operations: ops, Limits: sequence.Limits{Work: time.Minute, Undo: testkit.Patience}, Log: log,
	})
	conn := testkit.GRPC(t, tel, rpc.Service(&criv1.RuntimeService_ServiceDesc, runtime.New(runtime.Parts{
		Version: "1.2.3", Sequences: sequences, Sandboxes: sandboxd.Sandboxes, Containers: sandboxd.Containers,
		Node: sandboxd.Node, Sandboxd: sandboxd.Conn, Streams: urls{}, Events: containerevents.None{}, Self: self{},
	})), rpc.Service(&criv1.ImageService_ServiceDesc, image.New(sandboxd.Images)))
	return &bench{
		RuntimeServiceClient: criv1.NewRuntimeServiceClient(conn),
		images:               criv1.NewImageServiceClient(conn),
		sandboxd:             stand,
	}
}

func TestCalls(t *testing.T) {
	sandboxConfig := &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: "a", Namespace: "b", Uid: "c"}}
	b := newBench(t)
	ctx := t.Context()
	run, err := b.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: sandboxConfig})
	if err != nil {
		t.Fatal(err)
	}
	sandbox := run.GetPodSandboxId()
	create, err := b.CreateContainer(ctx, &criv1.CreateContainerRequest{
		PodSandboxId: sandbox[:12], // crictl lets people write only the beginning
		Config: &criv1.ContainerConfig{
			Metadata: &criv1.ContainerMetadata{Name: "app"}, Image: &criv1.ImageSpec{Image: "busybox"},
		},
		SandboxConfig: sandboxConfig,
	})
	if err != nil {
		t.Fatal(err)
	}
	container := create.GetContainerId()

	if _, err := b.Exec(ctx, &criv1.ExecRequest{ContainerId: container, Cmd: []string{"a"}, Stdout: true}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Exec before the start: %v, want FailedPrecondition", err)
	}
	if _, err := b.Attach(ctx, &criv1.AttachRequest{ContainerId: container, Stdout: true}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Attach before the start: %v, want FailedPrecondition", err)
	}
	if _, err := b.StartContainer(ctx, &criv1.StartContainerRequest{ContainerId: container[:12]}); err != nil {
		t.Errorf("StartContainer: %v", err)
	}
	exec, err := b.Exec(ctx, &criv1.ExecRequest{ContainerId: container[:12], Cmd: []string{"a"}, Stdout: true})
	if err != nil || exec.GetUrl() != "exec:"+container {
		t.Errorf("Exec = %v, %v; want the URL of the full id", exec, err)
	}
	attach, err := b.Attach(ctx, &criv1.AttachRequest{ContainerId: container, Stdout: true})
	if err != nil || attach.GetUrl() != "attach:"+container {
		t.Errorf("Attach = %v, %v; want a URL", attach, err)
	}
	forward, err := b.PortForward(ctx, &criv1.PortForwardRequest{PodSandboxId: sandbox[:12]})
	if err != nil || forward.GetUrl() != "forward:"+sandbox {
		t.Errorf("PortForward = %v, %v; want the URL of the full id", forward, err)
	}
	sync, err := b.ExecSync(ctx, &criv1.ExecSyncRequest{ContainerId: container, Cmd: []string{"echo", "x"}})
	if err != nil || string(sync.GetStdout()) != "echo x" {
		t.Errorf("ExecSync = %v, %v", sync, err)
	}
	status, err := b.ContainerStatus(ctx, &criv1.ContainerStatusRequest{ContainerId: container})
	if err != nil || status.GetStatus().GetState() != criv1.ContainerState_CONTAINER_RUNNING {
		t.Errorf("ContainerStatus = %v, %v; want a running container", status, err)
	}
	list, err := b.ListContainers(ctx, &criv1.ListContainersRequest{})
	if err != nil || len(list.GetContainers()) != 1 {
		t.Errorf("ListContainers without filter = %v, %v; want one", list, err)
	}
	if _, err := b.StopPodSandbox(ctx, &criv1.StopPodSandboxRequest{PodSandboxId: sandbox}); err != nil {
		t.Errorf("StopPodSandbox: %v", err)
	}
	if _, err := b.PortForward(ctx, &criv1.PortForwardRequest{PodSandboxId: sandbox}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("PortForward of a stopped sandbox: %v, want FailedPrecondition", err)
	}
	if _, err := b.RemovePodSandbox(ctx, &criv1.RemovePodSandboxRequest{PodSandboxId: sandbox}); err != nil {
		t.Errorf("RemovePodSandbox: %v", err)
	}
	if _, err := b.PodSandboxStatus(ctx, &criv1.PodSandboxStatusRequest{PodSandboxId: sandbox}); !errdefs.IsNotFound(err) {
		t.Errorf("PodSandboxStatus of a removed sandbox: %v, want NotFound", err)
	}
}

func TestUnknownAndEmptyIDs(t *testing.T) {
	b := newBench(t)
	ctx := t.Context()
	for name, call := range map[string]func(id string) error{
		"StopPodSandbox": func(id string) error {
			_, err := b.StopPodSandbox(ctx, &criv1.StopPodSandboxRequest{PodSandboxId: id})
			return err
		},
		"RemovePodSandbox": func(id string) error {
			_, err := b.RemovePodSandbox(ctx, &criv1.RemovePodSandboxRequest{PodSandboxId: id})
			return err
		},
		"StopContainer": func(id string) error {
			_, err := b.StopContainer(ctx, &criv1.StopContainerRequest{ContainerId: id})
			return err
		},
		"RemoveContainer": func(id string) error {
			_, err := b.RemoveContainer(ctx, &criv1.RemoveContainerRequest{ContainerId: id})
			return err
		},
	} {
		if err := call("unknown"); err != nil {
			t.Errorf("%s of an unknown id: %v", name, err)
		}
		if err := call(backendtest.ID("unknown")); err != nil {
			t.Errorf("%s of an unknown full id: %v", name, err)
		}
		for _, id := range []string{"", "a/b", "a\x00b"} {
			if err := call(id); !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s(%q): %v, want InvalidArgument", name, id, err)
			}
		}
	}
	if _, err := b.PodSandboxStatus(ctx, &criv1.PodSandboxStatusRequest{PodSandboxId: "x"}); !errdefs.IsNotFound(err) {
		t.Errorf("PodSandboxStatus: %v, want NotFound", err)
	}
	if _, err := b.StartContainer(ctx, &criv1.StartContainerRequest{ContainerId: "x"}); !errdefs.IsNotFound(err) {
		t.Errorf("StartContainer: %v, want NotFound", err)
	}
	if _, err := b.PodSandboxStats(ctx, &criv1.PodSandboxStatsRequest{}); errdefs.IsNotImplemented(err) || err == nil {
		t.Errorf("PodSandboxStats: %v, want an error other than NotImplemented", err)
	}
}

func TestRefusalsComeBeforeAnyWork(t *testing.T) {
	b := newBench(t)
	if _, err := b.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{}); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "config: must be set") {
		t.Errorf("RunPodSandbox: %v, want InvalidArgument about config", err)
	}
	if _, err := b.CreateContainer(t.Context(), &criv1.CreateContainerRequest{}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("CreateContainer: %v, want InvalidArgument", err)
	}
	if calls := b.sandboxd.Journal.Take(); len(calls) != 0 {
		t.Errorf("sandboxd was called: %v", calls)
	}
}

func TestNode(t *testing.T) {
	b := newBench(t)
	version, err := b.Version(t.Context(), &criv1.VersionRequest{})
	if err != nil || version.GetRuntimeVersion() != "1.2.3" {
		t.Errorf("Version = %v, %v", version, err)
	}
	config, err := b.RuntimeConfig(t.Context(), &criv1.RuntimeConfigRequest{})
	if err != nil || config.GetLinux().GetCgroupDriver() != criv1.CgroupDriver_CGROUPFS {
		t.Errorf("RuntimeConfig = %v, %v", config, err)
	}
	b.sandboxd.Failures.Fail("GetStatus", errdefs.ErrUnavailable)
	status, err := b.Status(t.Context(), &criv1.StatusRequest{})
	if err != nil || status.GetStatus().GetConditions()[0].GetStatus() {
		t.Errorf("Status without sandboxd = %v, %v; want not ready", status, err)
	}
	if status, err = b.Status(t.Context(), &criv1.StatusRequest{}); err != nil || !status.GetStatus().GetConditions()[0].GetStatus() {
		t.Errorf("Status = %v, %v; want ready", status, err)
	}
}

func TestVerboseStatus(t *testing.T) {
	b := newBench(t)
	status, err := b.Status(t.Context(), &criv1.StatusRequest{Verbose: true})
	if err != nil || status.GetInfo()["cri-gateway"] != `"well"` {
		t.Errorf("Status = %v, %v; want what the gateway says of itself", status, err)
	}
	if status, err = b.Status(t.Context(), &criv1.StatusRequest{}); err != nil || len(status.GetInfo()) != 0 {
		t.Errorf("Status = %v, %v; want no information unasked", status, err)
	}
}

func TestMetrics(t *testing.T) {
	b := newBench(t)
	b.sandboxd.AddContainer("sb1", "c1")
	b.sandboxd.AddContainer("sb2", "c2")
	descriptors, err := b.ListMetricDescriptors(t.Context(), &criv1.ListMetricDescriptorsRequest{})
	if err != nil || len(descriptors.GetDescriptors()) != 1 {
		t.Errorf("ListMetricDescriptors = %v, %v", descriptors, err)
	}
	list, err := b.ListPodSandboxMetrics(t.Context(), &criv1.ListPodSandboxMetricsRequest{})
	if err != nil || len(list.GetPodMetrics()) != 2 {
		t.Errorf("ListPodSandboxMetrics = %v, %v; want both pods", list, err)
	}
	stream, err := b.StreamPodSandboxMetrics(t.Context(), &criv1.StreamPodSandboxMetricsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if piece, err := stream.Recv(); err != nil || len(piece.GetPodSandboxMetrics()) != 1 {
		t.Errorf("first piece = %v, %v; want the piece as sandboxd sent it", piece, err)
	}
}

func TestEventsWithoutABus(t *testing.T) {
	b := newBench(t)
	stream, err := b.GetContainerEvents(t.Context(), &criv1.GetEventsRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "events.url") {
		t.Errorf("GetContainerEvents: %v, want FailedPrecondition that names the setting", err)
	}
}

func TestStreamedLists(t *testing.T) {
	b := newBench(t)
	for i := range 300 {
		b.sandboxd.AddContainer("sb", backendtest.ID(string(rune('a'+i))))
	}
	stream, err := b.StreamContainers(t.Context(), &criv1.StreamContainersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	n, pieces := 0, 0
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		n += len(m.GetContainers())
		pieces++
	}
	if n != 300 || pieces < 2 {
		t.Errorf("%d containers in %d pieces, want 300 in several", n, pieces)
	}
}

func TestImages(t *testing.T) {
	b := newBench(t)
	pulled, err := b.images.PullImage(t.Context(), &criv1.PullImageRequest{
		Image: &criv1.ImageSpec{Image: "busybox"}, Auth: &criv1.AuthConfig{Username: "me"},
	})
	if err != nil || pulled.GetImageRef() != "me@busybox" {
		t.Errorf("PullImage = %v, %v; want image and credentials passed on", pulled, err)
	}
	status, err := b.images.ImageStatus(t.Context(), &criv1.ImageStatusRequest{Image: &criv1.ImageSpec{Image: "none"}})
	if err != nil || status.GetImage() != nil {
		t.Errorf("ImageStatus of an unknown image = %v, %v; want an empty answer", status, err)
	}
	if _, err := b.images.ImageStatus(t.Context(), &criv1.ImageStatusRequest{}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("ImageStatus of nothing: %v, want InvalidArgument", err)
	}
	list, err := b.images.ListImages(t.Context(), &criv1.ListImagesRequest{})
	if err != nil || len(list.GetImages()) != 1 {
		t.Errorf("ListImages = %v, %v; want one", list, err)
	}
	usage, err := b.images.ImageFsInfo(t.Context(), &criv1.ImageFsInfoRequest{})
	if err != nil || usage.GetImageFilesystems()[0].GetFsId().GetMountpoint() == "" {
		t.Errorf("ImageFsInfo = %v, %v; want a mount point", usage, err)
	}
	if _, err := b.images.RemoveImage(t.Context(), &criv1.RemoveImageRequest{Image: &criv1.ImageSpec{Image: "x"}}); err != nil {
		t.Errorf("RemoveImage: %v", err)
	}
	for _, failure := range []error{
		errdefs.ErrUnavailable.WithMessage("RegistryUnavailable: try later"),
		errdefs.ErrPermissionDenied.WithMessage("SignatureValidationFailed: not signed"),
	} {
		b.sandboxd.Failures.Fail("PullImage", failure)
		_, err = b.images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: "busybox"}})
		if err == nil || !strings.HasPrefix(err.Error(), failure.Error()) {
			t.Errorf("PullImage: %v, want an error that begins with %q", err, failure)
		}
		// Only without a code kubelet sees the reason.
		if !errdefs.IsUnknown(err) {
			t.Errorf("PullImage: %v has a code", err)
		}
	}
}
