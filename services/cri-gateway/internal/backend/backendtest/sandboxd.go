// Package backendtest holds stand-ins for sandboxd and nri-hub with behaviour: they keep
// sandboxes and containers in memory as the real ones do on disk, write down every call
// in order, and fail on request. They are for tests only.
package backendtest

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/internal/rpc"
)

// Journal is the order in which calls came in, over all stand-ins that share it.
type Journal struct {
	// mu guards calls.
	mu    sync.Mutex
	calls []string
}

// Add writes a call down.
func (j *Journal) Add(call string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.calls = append(j.calls, call)
}

// Take returns what was written since the last Take.
func (j *Journal) Take() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	calls := j.calls
	j.calls = nil
	return calls
}

// Failures make calls fail, by the name in the journal.
type Failures struct {
	// mu guards the maps.
	mu     sync.Mutex
	errs   map[string][]error
	blocks map[string]chan struct{}
}

// Fail makes the next calls return the errors, one each.
func (f *Failures) Fail(call string, errs ...error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.errs == nil {
		f.errs = make(map[string][]error)
	}
	f.errs[call] = append(f.errs[call], errs...)
}

// Block makes calls wait until the returned function is called.
func (f *Failures) Block(call string) (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.blocks == nil {
		f.blocks = make(map[string]chan struct{})
	}
	gate := make(chan struct{})
	f.blocks[call] = gate
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.blocks, call)
		close(gate)
	}
}

func (f *Failures) check(ctx context.Context, call string) error {
	f.mu.Lock()
	gate := f.blocks[call]
	f.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if errs := f.errs[call]; len(errs) > 0 {
		f.errs[call] = errs[1:]
		return errs[0]
	}
	return nil
}

// Sandboxd is a sandboxd in memory.
type Sandboxd struct {
	Journal  *Journal
	Failures Failures
	// Exec runs a command of a streaming exec; nil refuses.
	Exec func(stream grpc.BidiStreamingServer[containerv1.ExecRequest, containerv1.ExecResponse], start *containerv1.ExecStart) error
	// Attach serves an attachment; nil refuses.
	Attach func(stream grpc.BidiStreamingServer[containerv1.AttachRequest, containerv1.AttachResponse], start *containerv1.AttachStart) error
	// Forward serves a forwarded port; nil refuses.
	Forward func(stream grpc.BidiStreamingServer[sandboxv1.PortForwardRequest, sandboxv1.PortForwardResponse], target *sandboxv1.PortForwardTarget) error

	// mu guards everything below.
	mu         sync.Mutex
	sandboxes  map[string]*sandbox
	containers map[string]*container
	sessions   []string
	hangUp     chan struct{}
	updates    []*containerv1.UpdateContainerResourcesRequest
}

type sandbox struct {
	config    *criv1.PodSandboxConfig
	committed bool
	stopped   bool
}

type container struct {
	sandbox    string
	config     *criv1.ContainerConfig
	adjustment *nri.ContainerAdjustment
	committed  bool
	state      criv1.ContainerState
}

// NewSandboxd returns an empty sandboxd that writes into journal.
func NewSandboxd(journal *Journal) *Sandboxd {
	return &Sandboxd{
		Journal:    journal,
		sandboxes:  make(map[string]*sandbox),
		containers: make(map[string]*container),
		hangUp:     make(chan struct{}),
	}
}

// Registrations returns its services.
func (s *Sandboxd) Registrations() []rpc.Registration {
	return []rpc.Registration{
		rpc.Service(&sandboxv1.SandboxService_ServiceDesc, &sandboxService{s: s}),
		rpc.Service(&containerv1.ContainerService_ServiceDesc, &containerService{s: s}),
		rpc.Service(&nodev1.NodeService_ServiceDesc, &nodeService{s: s}),
		rpc.Service(&imagev1.ImageService_ServiceDesc, &imageService{s: s}),
	}
}

// HangUp ends the open sessions, as a restart would.
func (s *Sandboxd) HangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.hangUp)
	s.hangUp = make(chan struct{})
}

// Sessions returns the tokens of all sessions that were opened.
func (s *Sandboxd) Sessions() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.sessions)
}

// Updates returns the resource updates that were done.
func (s *Sandboxd) Updates() []*containerv1.UpdateContainerResourcesRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.updates)
}

// Adjustment returns with what a container was committed.
func (s *Sandboxd) Adjustment(id string) *nri.ContainerAdjustment {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.containers[id].adjustment
}

// AddContainer puts a running container there without a call.
func (s *Sandboxd) AddContainer(sandboxID, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sandboxes[sandboxID] == nil {
		s.sandboxes[sandboxID] = &sandbox{config: &criv1.PodSandboxConfig{}, committed: true}
	}
	s.containers[id] = &container{
		sandbox: sandboxID, config: &criv1.ContainerConfig{}, committed: true, state: criv1.ContainerState_CONTAINER_RUNNING,
	}
}

// SetState changes the state of a container without a call.
func (s *Sandboxd) SetState(id string, state criv1.ContainerState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.containers[id].state = state
}

// Remove takes a container or a sandbox away without a call.
func (s *Sandboxd) Remove(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.containers, id)
	delete(s.sandboxes, id)
}

// begin writes the call down and fails it if it is to fail.
func (s *Sandboxd) begin(ctx context.Context, call string) error {
	s.Journal.Add(call)
	return s.Failures.check(ctx, call)
}

// pod and view are the object as plugins see it. Callers hold mu.
func (s *Sandboxd) pod(id string) *nri.PodSandbox {
	m := s.sandboxes[id].config.GetMetadata()
	return &nri.PodSandbox{Id: id, Name: m.GetName(), Namespace: m.GetNamespace(), Uid: m.GetUid()}
}

// statuses are those of a sandbox's containers. Callers hold mu.
func (s *Sandboxd) statuses(sandboxID string) []*criv1.ContainerStatus {
	var out []*criv1.ContainerStatus
	for id, c := range s.containers {
		if c.committed && c.sandbox == sandboxID {
			out = append(out, &criv1.ContainerStatus{Id: id, Metadata: c.config.GetMetadata(), State: c.state})
		}
	}
	return out
}

func (s *Sandboxd) view(id string) *nri.Container {
	c := s.containers[id]
	state := nri.ContainerState_CONTAINER_CREATED
	switch c.state {
	case criv1.ContainerState_CONTAINER_RUNNING:
		state = nri.ContainerState_CONTAINER_RUNNING
	case criv1.ContainerState_CONTAINER_EXITED:
		state = nri.ContainerState_CONTAINER_STOPPED
	case criv1.ContainerState_CONTAINER_UNKNOWN: // as long as it is being made
		state = nri.ContainerState_CONTAINER_UNKNOWN
	}
	return &nri.Container{Id: id, PodSandboxId: c.sandbox, Name: c.config.GetMetadata().GetName(), State: state}
}

func notFound(kind, id string) error { return fmt.Errorf("%s %q: %w", kind, id, errdefs.ErrNotFound) }
