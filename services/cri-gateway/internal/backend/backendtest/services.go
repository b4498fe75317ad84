package backendtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
)

// ID returns the id that a stand-in gives to the object with that key.
func ID(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

type sandboxService struct {
	sandboxv1.UnimplementedSandboxServiceServer
	s *Sandboxd
}

func (v *sandboxService) PrepareSandbox(ctx context.Context, req *sandboxv1.PrepareSandboxRequest) (*sandboxv1.PrepareSandboxResponse, error) {
	if err := v.s.begin(ctx, "PrepareSandbox"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	if !slices.Contains(v.s.sessions, req.GetSessionToken()) {
		return nil, fmt.Errorf("session: %w", errdefs.ErrFailedPrecondition)
	}
	m := req.GetConfig().GetMetadata()
	id := ID(fmt.Sprintf("%s/%s/%s/%d", m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt()))
	if old := v.s.sandboxes[id]; old != nil && old.committed {
		return &sandboxv1.PrepareSandboxResponse{SandboxId: id, Existing: true, Pod: v.s.pod(id)}, nil
	}
	if v.s.sandboxes[id] != nil {
		return nil, fmt.Errorf("sandbox %q of this name is being made: %w", id, errdefs.ErrUnavailable)
	}
	v.s.sandboxes[id] = &sandbox{config: req.GetConfig()}
	return &sandboxv1.PrepareSandboxResponse{SandboxId: id, Pod: v.s.pod(id)}, nil
}

func (v *sandboxService) CommitSandbox(ctx context.Context, req *sandboxv1.CommitSandboxRequest) (*sandboxv1.CommitSandboxResponse, error) {
	if err := v.s.begin(ctx, "CommitSandbox"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	sb := v.s.sandboxes[req.GetSandboxId()]
	if sb == nil {
		return nil, notFound("sandbox", req.GetSandboxId())
	}
	sb.committed = true
	return &sandboxv1.CommitSandboxResponse{}, nil
}

func (v *sandboxService) AbortSandbox(ctx context.Context, req *sandboxv1.AbortSandboxRequest) (*sandboxv1.AbortSandboxResponse, error) {
	if err := v.s.begin(ctx, "AbortSandbox"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	delete(v.s.sandboxes, req.GetSandboxId())
	return &sandboxv1.AbortSandboxResponse{}, nil
}

func (v *sandboxService) QuiesceSandbox(ctx context.Context, req *sandboxv1.QuiesceSandboxRequest) (*sandboxv1.QuiesceSandboxResponse, error) {
	if err := v.s.begin(ctx, "QuiesceSandbox"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	id := req.GetSandboxId()
	if v.s.sandboxes[id] == nil {
		return &sandboxv1.QuiesceSandboxResponse{}, nil
	}
	resp := &sandboxv1.QuiesceSandboxResponse{Found: true, Pod: v.s.pod(id)}
	for _, cid := range slices.Sorted(maps.Keys(v.s.containers)) {
		if c := v.s.containers[cid]; c.sandbox == id {
			c.state = criv1.ContainerState_CONTAINER_EXITED
			resp.Containers = append(resp.Containers, v.s.view(cid))
		}
	}
	return resp, nil
}

func (v *sandboxService) StopSandbox(ctx context.Context, req *sandboxv1.StopSandboxRequest) (*sandboxv1.StopSandboxResponse, error) {
	if err := v.s.begin(ctx, "StopSandbox"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	if sb := v.s.sandboxes[req.GetSandboxId()]; sb != nil {
		sb.stopped = true
	}
	return &sandboxv1.StopSandboxResponse{}, nil
}

func (v *sandboxService) RemoveSandbox(ctx context.Context, req *sandboxv1.RemoveSandboxRequest) (*sandboxv1.RemoveSandboxResponse, error) {
	if err := v.s.begin(ctx, "RemoveSandbox"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	delete(v.s.sandboxes, req.GetSandboxId())
	maps.DeleteFunc(v.s.containers, func(_ string, c *container) bool { return c.sandbox == req.GetSandboxId() })
	return &sandboxv1.RemoveSandboxResponse{}, nil
}

func (v *sandboxService) CheckRestore(ctx context.Context, _ *sandboxv1.CheckRestoreRequest) (*sandboxv1.CheckRestoreResponse, error) {
	return &sandboxv1.CheckRestoreResponse{}, v.s.begin(ctx, "CheckRestore")
}

func (v *sandboxService) GetSandbox(ctx context.Context, req *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	if err := v.s.begin(ctx, "GetSandbox"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	for id, sb := range v.s.sandboxes {
		if sb.committed && strings.HasPrefix(id, req.GetSandboxId()) {
			return &sandboxv1.GetSandboxResponse{Status: &criv1.PodSandboxStatus{
				Id: id, Metadata: sb.config.GetMetadata(), State: sandboxState(sb),
			}, Containers: v.s.statuses(id)}, nil
		}
	}
	return nil, notFound("sandbox", req.GetSandboxId())
}

func sandboxState(sb *sandbox) criv1.PodSandboxState {
	if sb.stopped {
		return criv1.PodSandboxState_SANDBOX_NOTREADY
	}
	return criv1.PodSandboxState_SANDBOX_READY
}

func (v *sandboxService) ListSandboxes(ctx context.Context, _ *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
	if err := v.s.begin(ctx, "ListSandboxes"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	resp := &sandboxv1.ListSandboxesResponse{}
	for _, id := range slices.Sorted(maps.Keys(v.s.sandboxes)) {
		if sb := v.s.sandboxes[id]; sb.committed {
			resp.Items = append(resp.Items, &criv1.PodSandbox{Id: id, Metadata: sb.config.GetMetadata(), State: sandboxState(sb)})
		}
	}
	return resp, nil
}

// StreamSandboxes sends each sandbox in a piece of its own.
func (v *sandboxService) StreamSandboxes(
	_ *sandboxv1.StreamSandboxesRequest, to grpc.ServerStreamingServer[sandboxv1.StreamSandboxesResponse],
) error {
	list, err := v.ListSandboxes(to.Context(), nil)
	for _, item := range list.GetItems() {
		if err := to.Send(&sandboxv1.StreamSandboxesResponse{Items: []*criv1.PodSandbox{item}}); err != nil {
			return err
		}
	}
	return err
}

func (v *sandboxService) StreamSandboxStats(
	_ *sandboxv1.StreamSandboxStatsRequest, to grpc.ServerStreamingServer[sandboxv1.StreamSandboxStatsResponse],
) error {
	list, err := v.ListSandboxes(to.Context(), nil)
	for _, item := range list.GetItems() {
		stats := &criv1.PodSandboxStats{Attributes: &criv1.PodSandboxAttributes{Id: item.GetId()}}
		if err := to.Send(&sandboxv1.StreamSandboxStatsResponse{Stats: []*criv1.PodSandboxStats{stats}}); err != nil {
			return err
		}
	}
	return err
}

func (v *sandboxService) StreamSandboxMetrics(
	_ *sandboxv1.StreamSandboxMetricsRequest, to grpc.ServerStreamingServer[sandboxv1.StreamSandboxMetricsResponse],
) error {
	list, err := v.ListSandboxes(to.Context(), nil)
	for _, item := range list.GetItems() {
		metrics := &criv1.PodSandboxMetrics{PodSandboxId: item.GetId()}
		if err := to.Send(&sandboxv1.StreamSandboxMetricsResponse{Metrics: []*criv1.PodSandboxMetrics{metrics}}); err != nil {
			return err
		}
	}
	return err
}

func (v *sandboxService) ListMetricDescriptors(
	ctx context.Context, _ *sandboxv1.ListMetricDescriptorsRequest,
) (*sandboxv1.ListMetricDescriptorsResponse, error) {
	if err := v.s.begin(ctx, "ListMetricDescriptors"); err != nil {
		return nil, err
	}
	return &sandboxv1.ListMetricDescriptorsResponse{Descriptors: []*criv1.MetricDescriptor{{Name: "a", Help: "b"}}}, nil
}

func (v *sandboxService) UpdateSandboxResources(ctx context.Context, req *sandboxv1.UpdateSandboxResourcesRequest) (*sandboxv1.UpdateSandboxResourcesResponse, error) {
	if err := v.s.begin(ctx, "UpdateSandboxResources"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	if v.s.sandboxes[req.GetSandboxId()] == nil {
		return nil, notFound("sandbox", req.GetSandboxId())
	}
	return &sandboxv1.UpdateSandboxResourcesResponse{Pod: v.s.pod(req.GetSandboxId())}, nil
}

func (v *sandboxService) PortForward(stream grpc.BidiStreamingServer[sandboxv1.PortForwardRequest, sandboxv1.PortForwardResponse]) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if v.s.Forward == nil {
		return fmt.Errorf("port forward: %w", errdefs.ErrNotImplemented)
	}
	return v.s.Forward(stream, m.GetTarget())
}

type containerService struct {
	containerv1.UnimplementedContainerServiceServer
	s *Sandboxd
}

func (v *containerService) PrepareContainer(ctx context.Context, req *containerv1.PrepareContainerRequest) (*containerv1.PrepareContainerResponse, error) {
	if err := v.s.begin(ctx, strings.TrimSpace("PrepareContainer "+req.GetCheckpointPath())); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	if sb := v.s.sandboxes[req.GetSandboxId()]; sb == nil || !sb.committed {
		return nil, notFound("sandbox", req.GetSandboxId())
	}
	m := req.GetConfig().GetMetadata()
	id := ID(fmt.Sprintf("%s/%s/%d", req.GetSandboxId(), m.GetName(), m.GetAttempt()))
	existing := v.s.containers[id] != nil && v.s.containers[id].committed
	if !existing {
		v.s.containers[id] = &container{sandbox: req.GetSandboxId(), config: req.GetConfig()}
	}
	return &containerv1.PrepareContainerResponse{
		ContainerId: id, Existing: existing, Pod: v.s.pod(req.GetSandboxId()), Container: v.s.view(id),
	}, nil
}

func (v *containerService) CommitContainer(ctx context.Context, req *containerv1.CommitContainerRequest) (*containerv1.CommitContainerResponse, error) {
	if err := v.s.begin(ctx, "CommitContainer"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return nil, notFound("container", req.GetContainerId())
	}
	c.committed, c.adjustment = true, req.GetAdjustment()
	return &containerv1.CommitContainerResponse{Pod: v.s.pod(c.sandbox), Container: v.s.view(req.GetContainerId())}, nil
}

func (v *containerService) AbortContainer(ctx context.Context, req *containerv1.AbortContainerRequest) (*containerv1.AbortContainerResponse, error) {
	if err := v.s.begin(ctx, "AbortContainer"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	delete(v.s.containers, req.GetContainerId())
	return &containerv1.AbortContainerResponse{}, nil
}

func (v *containerService) CreateTask(ctx context.Context, req *containerv1.CreateTaskRequest) (*containerv1.CreateTaskResponse, error) {
	failure := v.s.begin(ctx, "CreateTask")
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return nil, notFound("container", req.GetContainerId())
	}
	if failure != nil {
		c.state = criv1.ContainerState_CONTAINER_EXITED
		return nil, failure
	}
	return &containerv1.CreateTaskResponse{Pod: v.s.pod(c.sandbox), Container: v.s.view(req.GetContainerId())}, nil
}

func (v *containerService) RefuseStart(ctx context.Context, req *containerv1.RefuseStartRequest) (*containerv1.RefuseStartResponse, error) {
	if err := v.s.begin(ctx, "RefuseStart"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return nil, notFound("container", req.GetContainerId())
	}
	c.state = criv1.ContainerState_CONTAINER_EXITED
	return &containerv1.RefuseStartResponse{}, nil
}

func (v *containerService) StartContainer(ctx context.Context, req *containerv1.StartContainerRequest) (*containerv1.StartContainerResponse, error) {
	failure := v.s.begin(ctx, "StartContainer")
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return nil, notFound("container", req.GetContainerId())
	}
	if failure != nil {
		c.state = criv1.ContainerState_CONTAINER_EXITED
		return nil, failure
	}
	c.state = criv1.ContainerState_CONTAINER_RUNNING
	return &containerv1.StartContainerResponse{Pod: v.s.pod(c.sandbox), Container: v.s.view(req.GetContainerId())}, nil
}

func (v *containerService) StopContainer(ctx context.Context, req *containerv1.StopContainerRequest) (*containerv1.StopContainerResponse, error) {
	if err := v.s.begin(ctx, fmt.Sprintf("StopContainer(%d)", req.GetTimeoutSeconds())); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return &containerv1.StopContainerResponse{}, nil
	}
	c.state = criv1.ContainerState_CONTAINER_EXITED
	return &containerv1.StopContainerResponse{Found: true, Pod: v.s.pod(c.sandbox), Container: v.s.view(req.GetContainerId())}, nil
}

func (v *containerService) RemoveContainer(ctx context.Context, req *containerv1.RemoveContainerRequest) (*containerv1.RemoveContainerResponse, error) {
	if err := v.s.begin(ctx, "RemoveContainer"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return &containerv1.RemoveContainerResponse{}, nil
	}
	resp := &containerv1.RemoveContainerResponse{Found: true, Pod: v.s.pod(c.sandbox), Container: v.s.view(req.GetContainerId())}
	delete(v.s.containers, req.GetContainerId())
	return resp, nil
}

func (v *containerService) GetContainer(ctx context.Context, req *containerv1.GetContainerRequest) (*containerv1.GetContainerResponse, error) {
	if err := v.s.begin(ctx, "GetContainer"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	for id, c := range v.s.containers {
		if c.committed && strings.HasPrefix(id, req.GetContainerId()) {
			return &containerv1.GetContainerResponse{
				Status:    &criv1.ContainerStatus{Id: id, Metadata: c.config.GetMetadata(), State: c.state},
				SandboxId: c.sandbox, Tty: c.config.GetTty(), Stdin: c.config.GetStdin(),
			}, nil
		}
	}
	return nil, notFound("container", req.GetContainerId())
}

func (v *containerService) ListContainers(ctx context.Context, _ *containerv1.ListContainersRequest) (*containerv1.ListContainersResponse, error) {
	if err := v.s.begin(ctx, "ListContainers"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	resp := &containerv1.ListContainersResponse{}
	for _, id := range slices.Sorted(maps.Keys(v.s.containers)) {
		if c := v.s.containers[id]; c.committed {
			resp.Containers = append(resp.Containers, &criv1.Container{Id: id, PodSandboxId: c.sandbox, State: c.state})
		}
	}
	return resp, nil
}

// StreamContainers sends two containers in a piece.
func (v *containerService) StreamContainers(
	_ *containerv1.StreamContainersRequest, to grpc.ServerStreamingServer[containerv1.StreamContainersResponse],
) error {
	list, err := v.ListContainers(to.Context(), nil)
	for part := range slices.Chunk(list.GetContainers(), 2) {
		if err := to.Send(&containerv1.StreamContainersResponse{Containers: part}); err != nil {
			return err
		}
	}
	return err
}

func (v *containerService) StreamContainerStats(
	_ *containerv1.StreamContainerStatsRequest, to grpc.ServerStreamingServer[containerv1.StreamContainerStatsResponse],
) error {
	list, err := v.ListContainers(to.Context(), nil)
	for _, c := range list.GetContainers() {
		stats := &criv1.ContainerStats{Attributes: &criv1.ContainerAttributes{Id: c.GetId()}}
		if err := to.Send(&containerv1.StreamContainerStatsResponse{Stats: []*criv1.ContainerStats{stats}}); err != nil {
			return err
		}
	}
	return err
}

func (v *containerService) DescribeContainer(ctx context.Context, req *containerv1.DescribeContainerRequest) (*containerv1.DescribeContainerResponse, error) {
	if err := v.s.begin(ctx, "DescribeContainer"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return nil, notFound("container", req.GetContainerId())
	}
	return &containerv1.DescribeContainerResponse{Pod: v.s.pod(c.sandbox), Container: v.s.view(req.GetContainerId())}, nil
}

func (v *containerService) UpdateContainerResources(ctx context.Context, req *containerv1.UpdateContainerResourcesRequest) (*containerv1.UpdateContainerResourcesResponse, error) {
	if err := v.s.begin(ctx, "UpdateContainerResources"); err != nil {
		return nil, err
	}
	v.s.mu.Lock()
	defer v.s.mu.Unlock()
	c := v.s.containers[req.GetContainerId()]
	if c == nil {
		return nil, notFound("container", req.GetContainerId())
	}
	v.s.updates = append(v.s.updates, req)
	return &containerv1.UpdateContainerResourcesResponse{Pod: v.s.pod(c.sandbox), Container: v.s.view(req.GetContainerId())}, nil
}

func (v *containerService) ExecSync(ctx context.Context, req *containerv1.ExecSyncRequest) (*containerv1.ExecSyncResponse, error) {
	if err := v.s.begin(ctx, "ExecSync"); err != nil {
		return nil, err
	}
	return &containerv1.ExecSyncResponse{Stdout: []byte(strings.Join(req.GetCmd(), " "))}, nil
}

func (v *containerService) Exec(stream grpc.BidiStreamingServer[containerv1.ExecRequest, containerv1.ExecResponse]) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if v.s.Exec == nil {
		return fmt.Errorf("exec: %w", errdefs.ErrNotImplemented)
	}
	return v.s.Exec(stream, m.GetStart())
}

func (v *containerService) Attach(stream grpc.BidiStreamingServer[containerv1.AttachRequest, containerv1.AttachResponse]) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if v.s.Attach == nil {
		return fmt.Errorf("attach: %w", errdefs.ErrNotImplemented)
	}
	return v.s.Attach(stream, m.GetStart())
}

type nodeService struct {
	nodev1.UnimplementedNodeServiceServer
	s *Sandboxd
}

func (v *nodeService) OpenSession(req *nodev1.OpenSessionRequest, stream grpc.ServerStreamingServer[nodev1.OpenSessionResponse]) error {
	v.s.mu.Lock()
	v.s.sessions = append(v.s.sessions, req.GetSessionToken())
	hangUp := v.s.hangUp
	v.s.mu.Unlock()
	if err := stream.Send(&nodev1.OpenSessionResponse{Recovered: true}); err != nil {
		return err
	}
	select {
	case <-hangUp:
		return fmt.Errorf("restarting: %w", errdefs.ErrUnavailable)
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
}

func (v *nodeService) GetStatus(ctx context.Context, _ *nodev1.GetStatusRequest) (*nodev1.GetStatusResponse, error) {
	if err := v.s.begin(ctx, "GetStatus"); err != nil {
		return nil, err
	}
	return &nodev1.GetStatusResponse{Conditions: []*criv1.RuntimeCondition{
		{Type: criv1.RuntimeReady, Status: true}, {Type: criv1.NetworkReady, Status: true},
	}}, nil
}

func (v *nodeService) GetRuntimeConfig(ctx context.Context, _ *nodev1.GetRuntimeConfigRequest) (*nodev1.GetRuntimeConfigResponse, error) {
	if err := v.s.begin(ctx, "GetRuntimeConfig"); err != nil {
		return nil, err
	}
	return &nodev1.GetRuntimeConfigResponse{Linux: &criv1.LinuxRuntimeConfiguration{CgroupDriver: criv1.CgroupDriver_CGROUPFS}}, nil
}

func (v *nodeService) UpdateRuntimeConfig(ctx context.Context, _ *nodev1.UpdateRuntimeConfigRequest) (*nodev1.UpdateRuntimeConfigResponse, error) {
	if err := v.s.begin(ctx, "UpdateRuntimeConfig"); err != nil {
		return nil, err
	}
	return &nodev1.UpdateRuntimeConfigResponse{}, nil
}

// ListInventory sends each object in a piece of its own.
func (v *nodeService) ListInventory(_ *nodev1.ListInventoryRequest, stream grpc.ServerStreamingServer[nodev1.ListInventoryResponse]) error {
	if err := v.s.begin(stream.Context(), "ListInventory"); err != nil {
		return err
	}
	v.s.mu.Lock()
	var pieces []*nodev1.ListInventoryResponse
	for _, id := range slices.Sorted(maps.Keys(v.s.sandboxes)) {
		pieces = append(pieces, &nodev1.ListInventoryResponse{Pods: []*nri.PodSandbox{v.s.pod(id)}})
	}
	for _, id := range slices.Sorted(maps.Keys(v.s.containers)) {
		pieces = append(pieces, &nodev1.ListInventoryResponse{Containers: []*nri.Container{v.s.view(id)}})
	}
	v.s.mu.Unlock()
	for _, p := range pieces {
		if err := stream.Send(p); err != nil {
			return err
		}
	}
	return nil
}

type imageService struct {
	imagev1.UnimplementedImageServiceServer
	s *Sandboxd
}

func (v *imageService) PullImage(ctx context.Context, req *imagev1.PullImageRequest) (*imagev1.PullImageResponse, error) {
	if err := v.s.begin(ctx, "PullImage"); err != nil {
		return nil, err
	}
	return &imagev1.PullImageResponse{ImageRef: req.GetAuth().GetUsername() + "@" + req.GetImage().GetImage()}, nil
}

func (v *imageService) GetImage(ctx context.Context, _ *imagev1.GetImageRequest) (*imagev1.GetImageResponse, error) {
	if err := v.s.begin(ctx, "GetImage"); err != nil {
		return nil, err
	}
	return &imagev1.GetImageResponse{}, nil
}

func (v *imageService) ListImages(ctx context.Context, _ *imagev1.ListImagesRequest) (*imagev1.ListImagesResponse, error) {
	if err := v.s.begin(ctx, "ListImages"); err != nil {
		return nil, err
	}
	return &imagev1.ListImagesResponse{Images: []*criv1.Image{{Id: ID("image")}}}, nil
}

func (v *imageService) StreamImages(req *imagev1.StreamImagesRequest, to grpc.ServerStreamingServer[imagev1.StreamImagesResponse]) error {
	list, err := v.ListImages(to.Context(), &imagev1.ListImagesRequest{Filter: req.GetFilter()})
	if err != nil {
		return err
	}
	return to.Send(&imagev1.StreamImagesResponse{Images: list.GetImages()})
}

func (v *imageService) GetImageFilesystem(ctx context.Context, _ *imagev1.GetImageFilesystemRequest) (*imagev1.GetImageFilesystemResponse, error) {
	if err := v.s.begin(ctx, "GetImageFilesystem"); err != nil {
		return nil, err
	}
	usage := &criv1.FilesystemUsage{FsId: &criv1.FilesystemIdentifier{Mountpoint: "/var/lib/crisp"}}
	return &imagev1.GetImageFilesystemResponse{ImageFilesystems: []*criv1.FilesystemUsage{usage}}, nil
}

func (v *imageService) RemoveImage(ctx context.Context, _ *imagev1.RemoveImageRequest) (*imagev1.RemoveImageResponse, error) {
	if err := v.s.begin(ctx, "RemoveImage"); err != nil {
		return nil, err
	}
	return &imagev1.RemoveImageResponse{}, nil
}
