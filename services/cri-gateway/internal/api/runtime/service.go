// Package runtime implements the CRI RuntimeService.
//
// Every handler checks the form of its request first. Calls that change something are
// performed by package sequence; everything else is passed on to sandboxd, and nothing
// is cached. Lists that are streamed pass through piece by piece. Handlers may be called
// concurrently.
package runtime

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/containerevents"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/sequence"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/validate"
)

// Streams gives the URLs of streaming sessions.
type Streams interface {
	// ExecURL returns a URL that runs the command when a client comes.
	ExecURL(req *criv1.ExecRequest) (string, error)
	// AttachURL returns a URL that attaches when a client comes; terminal and stdin
	// tell what the container was made with.
	AttachURL(req *criv1.AttachRequest, terminal, stdin bool) (string, error)
	// PortForwardURL returns a URL that reaches the sandbox's ports when a client comes.
	PortForwardURL(req *criv1.PortForwardRequest) (string, error)
}

// Events lets callers follow what happens to containers.
type Events interface {
	// Follow returns a follower that gets every event from now on.
	// Errors: FailedPrecondition without a bus, Unavailable while it is away.
	Follow(ctx context.Context) (*containerevents.Follower, error)
}

// Self is what the gateway knows of itself and of the processes beside sandboxd.
type Self interface {
	// Able returns why calls would be refused although sandboxd is ready; nil if they
	// would not.
	Able(ctx context.Context) error
	// Plugins says whether there are plugins at all, why they cannot be called, which do
	// not answer and which required ones are away.
	Plugins(ctx context.Context) (enabled bool, degraded, missing []string, failure error)
	// Info describes the processes for people, by their names.
	Info(ctx context.Context) map[string]any
}

// Service is the RuntimeService.
type Service struct {
	criv1.UnimplementedRuntimeServiceServer

	version    string
	sequences  *sequence.Sequences
	sandboxes  sandboxv1.SandboxServiceClient
	containers containerv1.ContainerServiceClient
	node       nodev1.NodeServiceClient
	sandboxd   grpc.ClientConnInterface
	streams    Streams
	events     Events
	self       Self
}

// Parts are what a Service works with; all are required.
type Parts struct {
	// Version is the runtime's version as kubelet is told.
	Version    string
	Sequences  *sequence.Sequences
	Sandboxes  sandboxv1.SandboxServiceClient
	Containers containerv1.ContainerServiceClient
	Node       nodev1.NodeServiceClient
	// Sandboxd is the connection that the clients are on, for answers that are passed on
	// undecoded.
	Sandboxd grpc.ClientConnInterface
	Streams  Streams
	Events   Events
	Self     Self
}

// New returns a service made of the parts.
func New(p Parts) *Service {
	return &Service{
		version:    p.Version,
		sequences:  p.Sequences,
		sandboxes:  p.Sandboxes,
		containers: p.Containers,
		node:       p.Node,
		sandboxd:   p.Sandboxd,
		streams:    p.Streams,
		events:     p.Events,
		self:       p.Self,
	}
}

// fullID is the length of a complete id.
const fullID = 64

// sandboxID completes an id of which the caller gave only the beginning. An id that is
// complete or not known is returned as it is.
func (s *Service) sandboxID(ctx context.Context, id string) (string, error) {
	if err := validate.ID("pod_sandbox_id", id); err != nil || len(id) == fullID {
		return id, err
	}
	resp, err := s.sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{SandboxId: id})
	if errdefs.IsNotFound(err) {
		return id, nil
	}
	if err != nil {
		return "", fmt.Errorf("find sandbox %s: %w", id, err)
	}
	return resp.GetStatus().GetId(), nil
}

// containerID is sandboxID for containers.
func (s *Service) containerID(ctx context.Context, id string) (string, error) {
	if err := validate.ID("container_id", id); err != nil || len(id) == fullID {
		return id, err
	}
	resp, err := s.containers.GetContainer(ctx, &containerv1.GetContainerRequest{ContainerId: id})
	if errdefs.IsNotFound(err) {
		return id, nil
	}
	if err != nil {
		return "", fmt.Errorf("find container %s: %w", id, err)
	}
	return resp.GetStatus().GetId(), nil
}
