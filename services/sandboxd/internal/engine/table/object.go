package table

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Short names of the record states.
const (
	SandboxPreparing = recordv1.SandboxState_SANDBOX_STATE_PREPARING
	SandboxReady     = recordv1.SandboxState_SANDBOX_STATE_READY
	SandboxStopping  = recordv1.SandboxState_SANDBOX_STATE_STOPPING
	SandboxStopped   = recordv1.SandboxState_SANDBOX_STATE_STOPPED

	ContainerPreparing = recordv1.ContainerState_CONTAINER_STATE_PREPARING
	ContainerCreated   = recordv1.ContainerState_CONTAINER_STATE_CREATED
	ContainerRunning   = recordv1.ContainerState_CONTAINER_STATE_RUNNING
	ContainerExited    = recordv1.ContainerState_CONTAINER_STATE_EXITED
	ContainerUnknown   = recordv1.ContainerState_CONTAINER_STATE_UNKNOWN
)

// NewID returns an id for an object: 64 hex characters.
func NewID() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}

// Object is what sandboxes and containers have in common.
type Object struct {
	ID      string
	Turn    Slot   // operations
	Session string // token of the session that prepares it

	writing Slot // changes of the record
	doomed  atomic.Bool
}

// Common returns the part itself.
func (o *Object) Common() *Object { return o }

// Doom marks the object as one whose undoing is repeated until it succeeds, and says whether
// this call was the first.
func (o *Object) Doom() (first bool) { return o.doomed.CompareAndSwap(false, true) }

// Doomed says whether Doom was called.
func (o *Object) Doomed() bool { return o.doomed.Load() }

// Sandbox is one sandbox in memory. Fields without a comment on their use are set before
// the sandbox is in the table or by who has its turn while it is prepared.
type Sandbox struct {
	Object

	Handler    pod.Handler
	Files      pod.SandboxFiles
	Namespaces map[string]string // pinned namespaces by OCI type

	rec atomic.Pointer[recordv1.Sandbox]
}

// NewSandbox returns a sandbox that shows rec and is in no table.
func NewSandbox(rec *recordv1.Sandbox) *Sandbox {
	s := &Sandbox{Namespaces: rec.GetNamespaces()}
	s.ID, s.Turn, s.writing = rec.GetId(), newSlot(), newSlot()
	s.rec.Store(rec)
	return s
}

// Record is what the sandbox shows. The caller must not change it.
func (s *Sandbox) Record() *recordv1.Sandbox { return s.rec.Load() }

// Show shows a record that is not written, or cannot be.
func (s *Sandbox) Show(rec *recordv1.Sandbox) { s.rec.Store(rec) }

// Preparing says whether the sandbox is neither committed nor stopped.
func (s *Sandbox) Preparing() bool { return s.Record().GetState() == SandboxPreparing }

// key is the name that kubelet gives a sandbox: a repeated request has the same.
func (s *Sandbox) key() string {
	m := s.Record().GetConfig().GetMetadata()
	return fmt.Sprintf("sandbox/%s/%s/%s/%d", m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt())
}

// Container is one container in memory.
type Container struct {
	Object

	Sandbox *Sandbox
	// Pending is the specification until it is committed.
	Pending atomic.Pointer[specs.Spec]
	// Layer is the making of the writable layer; nil once committed. Only who has the turn
	// touches it.
	Layer *work.Job
	// TakeBack undoes what the specification changed on the node; nil once committed.
	// Only who has the turn touches it.
	TakeBack func()

	// Waiting is the process of a task that was created and is still to be started; nil if
	// there is none. Only who has the turn changes it.
	Waiting atomic.Pointer[uint32]

	OOM       atomic.Bool // the shim hinted at an OOM kill
	Signalled atomic.Bool // the stop signal was sent
	Killed    atomic.Bool // SIGKILL was sent

	rec     atomic.Pointer[recordv1.Container]
	started chan struct{}
	exited  chan struct{}
	deleted atomic.Pointer[chan struct{}]
}

// NewContainer returns a container of s that shows rec and is in no table.
func NewContainer(rec *recordv1.Container, s *Sandbox) *Container {
	c := &Container{Sandbox: s, started: make(chan struct{}), exited: make(chan struct{})}
	c.ID, c.Turn, c.writing = rec.GetId(), newSlot(), newSlot()
	c.rec.Store(rec)
	return c
}

// Record is what the container shows. The caller must not change it.
func (c *Container) Record() *recordv1.Container { return c.rec.Load() }

// Show shows a record that is not written, or cannot be.
func (c *Container) Show(rec *recordv1.Container) { c.rec.Store(rec) }

// Preparing says whether the container is not committed.
func (c *Container) Preparing() bool { return c.Record().GetState() == ContainerPreparing }

// Started is closed when the outcome of the start is recorded.
func (c *Container) Started() <-chan struct{} { return c.started }

// Exited is closed when the record says EXITED.
func (c *Container) Exited() <-chan struct{} { return c.exited }

// NoteDeleting says that the task of the ended container is being deleted; the returned
// function says that this is over.
func (c *Container) NoteDeleting() (done func()) {
	over := make(chan struct{})
	c.deleted.Store(&over)
	return func() { close(over) }
}

// Deleted is closed when the deletion of the container's task is over; nil, which is never
// ready, before the end.
func (c *Container) Deleted() <-chan struct{} {
	if ch := c.deleted.Load(); ch != nil {
		return *ch
	}
	return nil
}

// NoteStarted closes Started. Only operations with the container's turn call it.
func (c *Container) NoteStarted() { closeOnce(c.started) }

// NoteExited closes Exited. Only who records the end calls it.
func (c *Container) NoteExited() { closeOnce(c.exited) }

func closeOnce(ch chan struct{}) {
	select {
	case <-ch:
	default:
		close(ch)
	}
}

// Spec decodes the specification of a committed container, or returns the pending one.
func (c *Container) Spec() (*specs.Spec, error) {
	if p := c.Pending.Load(); p != nil {
		return p, nil
	}
	spec := &specs.Spec{}
	err := json.Unmarshal(c.Record().GetSpec(), spec)
	if err != nil {
		return nil, fmt.Errorf("container %q: specification: %w", c.ID, err)
	}
	return spec, nil
}

// key is the name that kubelet gives a container inside its sandbox.
func (c *Container) key() string {
	return containerKey(c.Sandbox.ID, c.Record().GetConfig().GetMetadata())
}

func containerKey(sandboxID string, m *criv1.ContainerMetadata) string {
	return fmt.Sprintf("container/%s/%s/%d", sandboxID, m.GetName(), m.GetAttempt())
}

// StateName is a container state in words, for errors.
func StateName(s recordv1.ContainerState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "CONTAINER_STATE_"))
}

// NotRunning is the error for a container that would have to run.
func NotRunning(id string, s recordv1.ContainerState) error {
	return fmt.Errorf("container %q is %s, not running: %w", id, StateName(s), errdefs.ErrFailedPrecondition)
}
