// Package sequence orders the steps of every call that changes something: sandboxd does
// the work, nri-hub is told and asked in between.
//
// Every sequence is an operation (see package operation): it outlives its caller, a
// repeated creation joins the first, and a sequence that fails undoes what it did under
// a context of its own. Nothing is remembered between sequences; sandboxd owns all state.
//
// An answer of the plugins that may refuse a step fails the sequence; what plugins are
// merely told is logged when it fails, because a pod must be removable with any plugin
// broken.
package sequence

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
)

// Hub is what the sequences need of nri-hub. A call that no plugin listens to costs
// nothing. When the hub is away, a call waits for it for a bounded time and then answers
// as the policy says: nil as if there were no plugins, or Unavailable.
type Hub interface {
	// Begin marks the begin of an operation that makes an object which plugins must hear
	// of; end marks its outcome.
	Begin(ctx context.Context) (_ context.Context, end func())
	// Wants reports whether anybody listens to one of the events.
	Wants(ctx context.Context, events ...nri.Event) (bool, error)
	// Notify tells the plugins of an event that has no answer.
	Notify(ctx context.Context, event nri.Event, pod *nri.PodSandbox, container *nri.Container) error
	// UpdatePodSandbox tells the plugins of new pod-level resources before the change.
	UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) error
	// CreateContainer asks for adjustments.
	CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error)
	// UpdateContainer asks about new resources of a container.
	UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error)
	// StopContainer tells of a container's end, once per container however often called.
	StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error)
}

// Session gives the token of the session with sandboxd.
type Session interface {
	// Token waits a bounded time for the session to be open. Errors: Unavailable.
	Token(ctx context.Context) (string, error)
}

// Limits bound how long things may take.
type Limits struct {
	// Work is the most that an operation may take, without a container's own timeout.
	Work time.Duration
	// Undo is the most that the undoing of a failed operation may take.
	Undo time.Duration
}

// Sequences performs the calls. It may be used concurrently.
type Sequences struct {
	sandboxes  sandboxv1.SandboxServiceClient
	containers containerv1.ContainerServiceClient
	node       nodev1.NodeServiceClient
	session    Session
	hub        Hub
	ops        *operation.Group
	limits     Limits
	log        *slog.Logger
}

// Parts are what Sequences works with; all are required.
type Parts struct {
	Sandboxes  sandboxv1.SandboxServiceClient
	Containers containerv1.ContainerServiceClient
	Node       nodev1.NodeServiceClient
	Session    Session
	Hub        Hub
	Operations *operation.Group
	Limits     Limits
	Log        *slog.Logger
}

// New returns sequences made of the parts.
func New(p Parts) *Sequences {
	return &Sequences{
		sandboxes:  p.Sandboxes,
		containers: p.Containers,
		node:       p.Node,
		session:    p.Session,
		hub:        p.Hub,
		ops:        p.Operations,
		limits:     p.Limits,
		log:        p.Log,
	}
}

// spec describes an operation that is joined by name and, if req is not nil, by content.
func (s *Sequences) spec(kind, name string, req proto.Message) operation.Spec {
	return operation.Spec{
		Key:         operation.Key{Kind: kind, Name: name},
		Fingerprint: fingerprint(req),
		Limit:       s.limits.Work,
	}
}

// fingerprint stands for the content of a message.
func fingerprint(m proto.Message) string {
	if m == nil {
		return ""
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		// What came over the wire can be put on it again. If it cannot, sandboxd
		// compares the configurations itself.
		return ""
	}
	sum := sha256.Sum256(b)
	return string(sum[:])
}

// undoing returns the context for undoing what was done under ctx.
func (s *Sequences) undoing(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), s.limits.Undo)
}

// tell notifies the plugins of an event whose failure must not stop the sequence.
func (s *Sequences) tell(ctx context.Context, event nri.Event, pod *nri.PodSandbox, container *nri.Container) {
	if err := s.hub.Notify(ctx, event, pod, container); err != nil {
		s.log.WarnContext(ctx, "plugins not notified", slog.String("event", event.PrettyName()),
			slog.String("sandbox_id", pod.GetId()), slog.String("container_id", container.GetId()),
			slog.Any("error", err))
	}
}

// tellStopped tells the plugins that a container has ended and does what they answer.
func (s *Sequences) tellStopped(ctx context.Context, pod *nri.PodSandbox, container *nri.Container) {
	resp, err := s.hub.StopContainer(ctx, &nri.StopContainerRequest{Pod: pod, Container: container})
	if err != nil {
		s.log.WarnContext(ctx, "plugins not notified", slog.String("event", nri.Event_STOP_CONTAINER.PrettyName()),
			slog.String("sandbox_id", pod.GetId()), slog.String("container_id", container.GetId()),
			slog.Any("error", err))
		return
	}
	if err := s.updateOthers(ctx, container.GetId(), resp.GetUpdate()); err != nil {
		s.log.WarnContext(ctx, "container not updated as a plugin wanted", slog.Any("error", err))
	}
}

// commitTries is how often a commit is repeated when sandboxd goes away during it. A
// commit is idempotent, and an undo after a commit that did happen would take a READY
// object away.
const commitTries = 3

// commit repeats a commit whose answer was lost, once sandboxd is back.
func (s *Sequences) commit(ctx context.Context, do func(token string) error) error {
	var err error
	for range commitTries {
		var token string
		if token, err = s.session.Token(ctx); err != nil {
			return err
		}
		if err = do(token); !errdefs.IsUnavailable(err) {
			return err
		}
	}
	return fmt.Errorf("no answer after %d tries: %w", commitTries, err)
}
