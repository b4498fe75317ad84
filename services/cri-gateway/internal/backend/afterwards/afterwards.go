// Package afterwards tells plugins what has happened after the caller has its answer.
package afterwards

import (
	"context"
	"log/slog"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/sequence"
)

// tellTime bounds the telling of one event for which nobody waits.
const tellTime = time.Minute

// Hub is a hub for whose plugins nobody waits when an event only tells what has
// happened (PostCreateContainer and its like): the caller has its answer meanwhile. The
// order stays: whatever comes next for the same pod waits until the plugins were told.
// It is safe for concurrent use.
type Hub struct {
	sequence.Hub

	log     *slog.Logger
	telling sync.WaitGroup

	// mu guards last.
	mu   sync.Mutex
	last map[string]chan struct{} // by pod; closed when its latest event was told
}

var _ sequence.Hub = (*Hub)(nil)

// New returns hub with that property. Wait must be called before hub ends.
func New(hub sequence.Hub, log *slog.Logger) *Hub {
	return &Hub{Hub: hub, log: log, last: make(map[string]chan struct{})}
}

// Wait returns when everything was told. No call may come any more.
func (a *Hub) Wait() { a.telling.Wait() }

// Notify implements sequence.Hub. For an event that tells what has happened it returns at
// once, and a failure is logged.
func (a *Hub) Notify(ctx context.Context, event nri.Event, pod *nri.PodSandbox, container *nri.Container) error {
	switch event {
	case nri.Event_POST_CREATE_CONTAINER, nri.Event_POST_START_CONTAINER,
		nri.Event_POST_UPDATE_CONTAINER, nri.Event_POST_UPDATE_POD_SANDBOX:
		if listened, err := a.Wants(ctx, event); err == nil && !listened {
			return nil
		}
		a.later(ctx, event, pod, container)
		return nil
	default:
		if err := a.await(ctx, pod); err != nil {
			return err
		}
		return a.Hub.Notify(ctx, event, pod, container)
	}
}

func (a *Hub) later(ctx context.Context, event nri.Event, pod *nri.PodSandbox, container *nri.Container) {
	id, told := pod.GetId(), make(chan struct{})
	a.mu.Lock()
	before := a.last[id]
	a.last[id] = told
	a.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellTime)
	a.telling.Go(func() {
		defer cancel()
		defer func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			close(told)
			if a.last[id] == told {
				delete(a.last, id)
			}
		}()
		if before != nil {
			<-before // bounded as this one is
		}
		if err := a.Hub.Notify(ctx, event, pod, container); err != nil {
			a.log.WarnContext(ctx, "plugins not notified", slog.String("event", event.PrettyName()),
				slog.String("sandbox_id", id), slog.String("container_id", container.GetId()), slog.Any("error", err))
		}
	})
}

// await returns when the plugins were told everything of the pod up to now.
func (a *Hub) await(ctx context.Context, pod *nri.PodSandbox) error {
	a.mu.Lock()
	told := a.last[pod.GetId()]
	a.mu.Unlock()
	if told == nil {
		return nil
	}
	select {
	case <-told:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// UpdatePodSandbox implements sequence.Hub.
func (a *Hub) UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) error {
	if err := a.await(ctx, req.GetPod()); err != nil {
		return err
	}
	return a.Hub.UpdatePodSandbox(ctx, req)
}

// CreateContainer implements sequence.Hub.
func (a *Hub) CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	if err := a.await(ctx, req.GetPod()); err != nil {
		return nil, err
	}
	return a.Hub.CreateContainer(ctx, req)
}

// UpdateContainer implements sequence.Hub.
func (a *Hub) UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	if err := a.await(ctx, req.GetPod()); err != nil {
		return nil, err
	}
	return a.Hub.UpdateContainer(ctx, req)
}

// StopContainer implements sequence.Hub.
func (a *Hub) StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	if err := a.await(ctx, req.GetPod()); err != nil {
		return nil, err
	}
	return a.Hub.StopContainer(ctx, req)
}
