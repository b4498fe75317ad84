package backendtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/internal/rpc"
)

// Hub is an nri-hub without plugins of its own: its answers are set by the test.
type Hub struct {
	nriv1.UnimplementedHubServiceServer

	Journal  *Journal
	Failures Failures

	// mu guards everything below.
	mu      sync.Mutex
	state   *nriv1.HubState
	create  *nri.CreateContainerResponse
	update  *nri.UpdateContainerResponse
	stop    *nri.StopContainerResponse
	gateway chan *nriv1.ConnectResponse
	hangUp  chan struct{}
	// received holds what the gateway sent after its Hello.
	received chan *nriv1.ConnectRequest
}

// AllEvents is the mask of a hub whose plugins listen to everything.
func AllEvents() int32 {
	var mask nri.EventMask
	for e := nri.Event_RUN_POD_SANDBOX; e < nri.Event_LAST; e++ {
		mask.Set(e)
	}
	return int32(mask)
}

// NewHub returns a hub that announces state and writes into journal.
func NewHub(journal *Journal, state *nriv1.HubState) *Hub {
	return &Hub{
		Journal:  journal,
		state:    state,
		gateway:  make(chan *nriv1.ConnectResponse),
		hangUp:   make(chan struct{}),
		received: make(chan *nriv1.ConnectRequest, 64),
	}
}

// Registrations returns its service.
func (h *Hub) Registrations() []rpc.Registration {
	return []rpc.Registration{rpc.Service(&nriv1.HubService_ServiceDesc, h), rpc.WithLanes()}
}

// Announce changes the state and tells the gateway.
func (h *Hub) Announce(state *nriv1.HubState) {
	h.mu.Lock()
	h.state = state
	h.mu.Unlock()
	h.Send(&nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_State{State: state}})
}

// Restart changes the state and ends the gateway's stream, as a restart would.
func (h *Hub) Restart(state *nriv1.HubState) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state = state
	close(h.hangUp)
	h.hangUp = make(chan struct{})
}

// Send sends a message on the gateway's stream, once there is one.
func (h *Hub) Send(m *nriv1.ConnectResponse) { h.gateway <- m }

// Receive returns the next message of the gateway.
func (h *Hub) Receive(ctx context.Context) (*nriv1.ConnectRequest, error) {
	select {
	case m := <-h.received:
		return m, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// AnswerCreate sets what the plugins answer from now on, like the two after it.
func (h *Hub) AnswerCreate(r *nri.CreateContainerResponse) { h.set(func() { h.create = r }) }

// AnswerUpdate is described at AnswerCreate.
func (h *Hub) AnswerUpdate(r *nri.UpdateContainerResponse) { h.set(func() { h.update = r }) }

// AnswerStop is described at AnswerCreate.
func (h *Hub) AnswerStop(r *nri.StopContainerResponse) { h.set(func() { h.stop = r }) }

func (h *Hub) set(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
}

func (h *Hub) begin(ctx context.Context, call string, generation uint64) error {
	h.Journal.Add("hub." + call)
	if err := h.Failures.check(ctx, call); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if generation != h.state.GetGeneration() {
		return fmt.Errorf("generation %d is not %d: %w", generation, h.state.GetGeneration(), errdefs.ErrUnavailable)
	}
	return nil
}

// Connect implements nriv1.HubServiceServer.
func (h *Hub) Connect(stream grpc.BidiStreamingServer[nriv1.ConnectRequest, nriv1.ConnectResponse]) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	h.mu.Lock()
	state, hangUp := h.state, h.hangUp
	h.mu.Unlock()
	if err := stream.Send(&nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_State{State: state}}); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			h.received <- m
		}
	}()
	for {
		select {
		case m := <-h.gateway:
			if err := stream.Send(m); err != nil {
				return err
			}
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-hangUp:
			return fmt.Errorf("restarting: %w", errdefs.ErrUnavailable)
		}
	}
}

// RunPodSandbox implements nriv1.HubServiceServer.
func (h *Hub) RunPodSandbox(ctx context.Context, r *nriv1.RunPodSandboxRequest) (*nriv1.RunPodSandboxResponse, error) {
	return &nriv1.RunPodSandboxResponse{}, h.begin(ctx, "RunPodSandbox", r.GetGeneration())
}

// UpdatePodSandbox implements nriv1.HubServiceServer.
func (h *Hub) UpdatePodSandbox(ctx context.Context, r *nriv1.UpdatePodSandboxRequest) (*nriv1.UpdatePodSandboxResponse, error) {
	return &nriv1.UpdatePodSandboxResponse{}, h.begin(ctx, "UpdatePodSandbox", r.GetGeneration())
}

// PostUpdatePodSandbox implements nriv1.HubServiceServer.
func (h *Hub) PostUpdatePodSandbox(ctx context.Context, r *nriv1.PostUpdatePodSandboxRequest) (*nriv1.PostUpdatePodSandboxResponse, error) {
	return &nriv1.PostUpdatePodSandboxResponse{}, h.begin(ctx, "PostUpdatePodSandbox", r.GetGeneration())
}

// StopPodSandbox implements nriv1.HubServiceServer.
func (h *Hub) StopPodSandbox(ctx context.Context, r *nriv1.StopPodSandboxRequest) (*nriv1.StopPodSandboxResponse, error) {
	return &nriv1.StopPodSandboxResponse{}, h.begin(ctx, "StopPodSandbox", r.GetGeneration())
}

// RemovePodSandbox implements nriv1.HubServiceServer.
func (h *Hub) RemovePodSandbox(ctx context.Context, r *nriv1.RemovePodSandboxRequest) (*nriv1.RemovePodSandboxResponse, error) {
	return &nriv1.RemovePodSandboxResponse{}, h.begin(ctx, "RemovePodSandbox", r.GetGeneration())
}

// CreateContainer implements nriv1.HubServiceServer.
func (h *Hub) CreateContainer(ctx context.Context, r *nriv1.CreateContainerRequest) (*nriv1.CreateContainerResponse, error) {
	err := h.begin(ctx, "CreateContainer", r.GetGeneration())
	h.mu.Lock()
	defer h.mu.Unlock()
	return &nriv1.CreateContainerResponse{Response: h.create}, err
}

// PostCreateContainer implements nriv1.HubServiceServer.
func (h *Hub) PostCreateContainer(ctx context.Context, r *nriv1.PostCreateContainerRequest) (*nriv1.PostCreateContainerResponse, error) {
	return &nriv1.PostCreateContainerResponse{}, h.begin(ctx, "PostCreateContainer", r.GetGeneration())
}

// StartContainer implements nriv1.HubServiceServer.
func (h *Hub) StartContainer(ctx context.Context, r *nriv1.StartContainerRequest) (*nriv1.StartContainerResponse, error) {
	return &nriv1.StartContainerResponse{}, h.begin(ctx, "StartContainer", r.GetGeneration())
}

// PostStartContainer implements nriv1.HubServiceServer.
func (h *Hub) PostStartContainer(ctx context.Context, r *nriv1.PostStartContainerRequest) (*nriv1.PostStartContainerResponse, error) {
	return &nriv1.PostStartContainerResponse{}, h.begin(ctx, "PostStartContainer", r.GetGeneration())
}

// UpdateContainer implements nriv1.HubServiceServer.
func (h *Hub) UpdateContainer(ctx context.Context, r *nriv1.UpdateContainerRequest) (*nriv1.UpdateContainerResponse, error) {
	err := h.begin(ctx, "UpdateContainer", r.GetGeneration())
	h.mu.Lock()
	defer h.mu.Unlock()
	return &nriv1.UpdateContainerResponse{Response: h.update}, err
}

// PostUpdateContainer implements nriv1.HubServiceServer.
func (h *Hub) PostUpdateContainer(ctx context.Context, r *nriv1.PostUpdateContainerRequest) (*nriv1.PostUpdateContainerResponse, error) {
	return &nriv1.PostUpdateContainerResponse{}, h.begin(ctx, "PostUpdateContainer", r.GetGeneration())
}

// StopContainer implements nriv1.HubServiceServer.
func (h *Hub) StopContainer(ctx context.Context, r *nriv1.StopContainerRequest) (*nriv1.StopContainerResponse, error) {
	err := h.begin(ctx, "StopContainer", r.GetGeneration())
	h.mu.Lock()
	defer h.mu.Unlock()
	return &nriv1.StopContainerResponse{Response: h.stop}, err
}

// RemoveContainer implements nriv1.HubServiceServer.
func (h *Hub) RemoveContainer(ctx context.Context, r *nriv1.RemoveContainerRequest) (*nriv1.RemoveContainerResponse, error) {
	return &nriv1.RemoveContainerResponse{}, h.begin(ctx, "RemoveContainer", r.GetGeneration())
}
