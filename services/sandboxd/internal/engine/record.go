package engine

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Short names of the record states.
const (
	sandboxPreparing = recordv1.SandboxState_SANDBOX_STATE_PREPARING
	sandboxReady     = recordv1.SandboxState_SANDBOX_STATE_READY
	sandboxStopping  = recordv1.SandboxState_SANDBOX_STATE_STOPPING
	sandboxStopped   = recordv1.SandboxState_SANDBOX_STATE_STOPPED

	containerPreparing = recordv1.ContainerState_CONTAINER_STATE_PREPARING
	containerCreated   = recordv1.ContainerState_CONTAINER_STATE_CREATED
	containerRunning   = recordv1.ContainerState_CONTAINER_STATE_RUNNING
	containerExited    = recordv1.ContainerState_CONTAINER_STATE_EXITED
	containerUnknown   = recordv1.ContainerState_CONTAINER_STATE_UNKNOWN
)

// writeTime bounds one change of a record.
const writeTime = 30 * time.Second

// sandboxKey is the name that kubelet gives a sandbox: a repeated request has the same.
func sandboxKey(m *criv1.PodSandboxMetadata) string {
	return fmt.Sprintf("sandbox/%s/%s/%s/%d", m.GetNamespace(), m.GetName(), m.GetUid(), m.GetAttempt())
}

// containerKey is the name that kubelet gives a container inside its sandbox.
func containerKey(sandboxID string, m *criv1.ContainerMetadata) string {
	return fmt.Sprintf("container/%s/%s/%d", sandboxID, m.GetName(), m.GetAttempt())
}

// saveSandbox writes a changed clone of the sandbox's record together with events, and
// shows it once it is durable. The write is not given up when ctx ends.
func (e *Engine) saveSandbox(ctx context.Context, s *sandbox, change func(*recordv1.Sandbox), evs ...*recordv1.Event) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
	defer cancel()
	done, err := s.writing.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	next := proto.CloneOf(s.rec.Load())
	change(next)
	err = e.p.Store.Update(ctx, func(tx *store.Tx) error {
		err := tx.PutSandbox(next)
		if err != nil {
			return err
		}
		return appendEvents(tx, evs...)
	})
	if err != nil {
		return fmt.Errorf("sandbox %q: %w", s.id, err)
	}
	s.rec.Store(next)
	return nil
}

// saveContainer is saveSandbox for a container.
func (e *Engine) saveContainer(ctx context.Context, c *container, change func(*recordv1.Container) ([]*recordv1.Event, error)) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTime)
	defer cancel()
	done, err := c.writing.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	next := proto.CloneOf(c.rec.Load())
	evs, err := change(next)
	if err != nil {
		return err
	}
	err = e.p.Store.Update(ctx, func(tx *store.Tx) error {
		err := tx.PutContainer(next)
		if err != nil {
			return err
		}
		return appendEvents(tx, evs...)
	})
	if err != nil {
		return fmt.Errorf("container %q: %w", c.id, err)
	}
	c.rec.Store(next)
	return nil
}

func newSandbox(rec *recordv1.Sandbox) *sandbox {
	s := &sandbox{id: rec.GetId(), turn: newSlot(), writing: newSlot(), namespaces: rec.GetNamespaces()}
	s.rec.Store(rec)
	return s
}

func newContainer(rec *recordv1.Container, s *sandbox) *container {
	c := &container{
		id: rec.GetId(), sandbox: s, turn: newSlot(), writing: newSlot(),
		started: make(chan struct{}), exited: make(chan struct{}),
	}
	c.rec.Store(rec)
	return c
}
