package backend

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
)

// Notify implements sequence.Hub.
func (h *Hub) Notify(ctx context.Context, event nri.Event, pod *nri.PodSandbox, container *nri.Container) error {
	events := []nri.Event{event}
	if event == nri.Event_REMOVE_CONTAINER {
		// The hub sends the stop that a plugin has not seen before the removal.
		events = append(events, nri.Event_STOP_CONTAINER)
	}
	var made *nri.PodSandbox
	if event == nri.Event_RUN_POD_SANDBOX {
		made = pod
	}
	return h.call(ctx, made, func(ctx context.Context, generation uint64) error {
		return h.notify(ctx, generation, event, pod, container)
	}, events...)
}

func (h *Hub) notify(ctx context.Context, gen uint64, event nri.Event, pod *nri.PodSandbox, ctr *nri.Container) error {
	var err error
	switch event {
	case nri.Event_RUN_POD_SANDBOX:
		var resp *nriv1.RunPodSandboxResponse
		resp, err = h.client.RunPodSandbox(ctx, &nriv1.RunPodSandboxRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.RunPodSandboxRequest{Pod: pod}, TimeLeftMs: timeLeft(ctx),
		})
		passed(ctx, resp.GetMerge())
	case nri.Event_STOP_POD_SANDBOX:
		_, err = h.client.StopPodSandbox(ctx, &nriv1.StopPodSandboxRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.StopPodSandboxRequest{Pod: pod},
		})
	case nri.Event_REMOVE_POD_SANDBOX:
		_, err = h.client.RemovePodSandbox(ctx, &nriv1.RemovePodSandboxRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.RemovePodSandboxRequest{Pod: pod},
		})
	case nri.Event_POST_UPDATE_POD_SANDBOX:
		_, err = h.client.PostUpdatePodSandbox(ctx, &nriv1.PostUpdatePodSandboxRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.PostUpdatePodSandboxRequest{Pod: pod},
		})
	case nri.Event_POST_CREATE_CONTAINER:
		_, err = h.client.PostCreateContainer(ctx, &nriv1.PostCreateContainerRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.PostCreateContainerRequest{Pod: pod, Container: ctr},
		})
	case nri.Event_START_CONTAINER:
		_, err = h.client.StartContainer(ctx, &nriv1.StartContainerRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.StartContainerRequest{Pod: pod, Container: ctr}, TimeLeftMs: timeLeft(ctx),
		})
	case nri.Event_POST_START_CONTAINER:
		_, err = h.client.PostStartContainer(ctx, &nriv1.PostStartContainerRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.PostStartContainerRequest{Pod: pod, Container: ctr},
		})
	case nri.Event_POST_UPDATE_CONTAINER:
		_, err = h.client.PostUpdateContainer(ctx, &nriv1.PostUpdateContainerRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.PostUpdateContainerRequest{Pod: pod, Container: ctr},
		})
	case nri.Event_REMOVE_CONTAINER:
		_, err = h.client.RemoveContainer(ctx, &nriv1.RemoveContainerRequest{
			Generation: gen, Leg: legOf(ctx), Request: &nri.RemoveContainerRequest{Pod: pod, Container: ctr},
		})
	default:
		return fmt.Errorf("event %s has an answer: %w", event.PrettyName(), errdefs.ErrInternal)
	}
	return err
}

// timeLeft is how long the caller still waits, in milliseconds; 0 if that is not known or
// if it has gone.
func timeLeft(ctx context.Context) int64 {
	deadline, ok := operation.CallerDeadline(ctx)
	if !ok {
		return 0
	}
	return max(time.Until(deadline).Milliseconds(), 0)
}

// UpdatePodSandbox implements sequence.Hub.
func (h *Hub) UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) error {
	return h.call(ctx, nil, func(ctx context.Context, generation uint64) error {
		_, err := h.client.UpdatePodSandbox(ctx, &nriv1.UpdatePodSandboxRequest{
			Generation: generation, Leg: legOf(ctx), Request: req, TimeLeftMs: timeLeft(ctx),
		})
		return err
	}, nri.Event_UPDATE_POD_SANDBOX)
}

// CreateContainer implements sequence.Hub.
func (h *Hub) CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	var answer *nri.CreateContainerResponse
	err := h.call(ctx, req.GetPod(), func(ctx context.Context, generation uint64) error {
		resp, err := h.client.CreateContainer(ctx, &nriv1.CreateContainerRequest{
			Generation: generation, Leg: legOf(ctx), Request: req, TimeLeftMs: timeLeft(ctx),
		})
		answer = resp.GetResponse()
		passed(ctx, resp.GetMerge())
		return err
	}, nri.Event_CREATE_CONTAINER, nri.Event_VALIDATE_CONTAINER_ADJUSTMENT)
	return answer, err
}

// UpdateContainer implements sequence.Hub.
func (h *Hub) UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	var answer *nri.UpdateContainerResponse
	err := h.call(ctx, nil, func(ctx context.Context, generation uint64) error {
		resp, err := h.client.UpdateContainer(ctx, &nriv1.UpdateContainerRequest{
			Generation: generation, Leg: legOf(ctx), Request: req, TimeLeftMs: timeLeft(ctx),
		})
		answer = resp.GetResponse()
		passed(ctx, resp.GetMerge())
		return err
	}, nri.Event_UPDATE_CONTAINER)
	return answer, err
}

// StopContainer implements sequence.Hub.
func (h *Hub) StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	var answer *nri.StopContainerResponse
	err := h.call(ctx, nil, func(ctx context.Context, generation uint64) error {
		resp, err := h.client.StopContainer(ctx, &nriv1.StopContainerRequest{Generation: generation, Leg: legOf(ctx), Request: req})
		answer = resp.GetResponse()
		passed(ctx, resp.GetMerge())
		return err
	}, nri.Event_STOP_CONTAINER)
	return answer, err
}

// NoHub is the hub of a gateway that is configured without one: there are no plugins.
type NoHub struct{}

// Begin implements sequence.Hub.
func (NoHub) Begin(ctx context.Context) (context.Context, func()) { return ctx, func() {} }

// Wants implements sequence.Hub.
func (NoHub) Wants(context.Context, ...nri.Event) (bool, error) { return false, nil }

// Notify implements sequence.Hub.
func (NoHub) Notify(context.Context, nri.Event, *nri.PodSandbox, *nri.Container) error { return nil }

// UpdatePodSandbox implements sequence.Hub.
func (NoHub) UpdatePodSandbox(context.Context, *nri.UpdatePodSandboxRequest) error { return nil }

// CreateContainer implements sequence.Hub.
func (NoHub) CreateContainer(context.Context, *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	return &nri.CreateContainerResponse{}, nil
}

// UpdateContainer implements sequence.Hub.
func (NoHub) UpdateContainer(context.Context, *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	return &nri.UpdateContainerResponse{}, nil
}

// StopContainer implements sequence.Hub.
func (NoHub) StopContainer(context.Context, *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	return &nri.StopContainerResponse{}, nil
}
