package plugin

import (
	"context"
	"fmt"
	"log/slog"

	nri "github.com/containerd/nri/pkg/api"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// send calls the method of an event, or StateChange if the plugin has no such method.
func (p *conn) send(ctx context.Context, event nri.Event, req proto.Message) (proto.Message, error) {
	if p.usesStateChange(event) {
		return p.stateChange(ctx, event, req)
	}
	resp, err := p.invoke(ctx, event, req)
	if status.Code(err) != grpccodes.Unimplemented {
		return resp, err
	}
	switch {
	case hasStateChange(event):
		p.log.WarnContext(ctx, "plugin has no method for the event and is sent state changes instead; it should be updated",
			slog.String("plugin", p.info.ID.String()), slog.String("event", event.PrettyName()))
		p.mu.Lock()
		p.fallback[event] = true
		p.mu.Unlock()
		return p.stateChange(ctx, event, req)
	case event == nri.Event_UPDATE_POD_SANDBOX:
		// For information only; there is nothing that a plugin could miss to answer.
		return nil, nil
	default:
		return nil, err
	}
}

func (p *conn) usesStateChange(event nri.Event) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fallback[event]
}

// invoke makes the typed call.
func (p *conn) invoke(ctx context.Context, event nri.Event, req proto.Message) (proto.Message, error) {
	switch r := req.(type) {
	case *nri.RunPodSandboxRequest:
		return erase(p.remote.RunPodSandbox(ctx, r))
	case *nri.UpdatePodSandboxRequest:
		return erase(p.remote.UpdatePodSandbox(ctx, r))
	case *nri.PostUpdatePodSandboxRequest:
		return erase(p.remote.PostUpdatePodSandbox(ctx, r))
	case *nri.StopPodSandboxRequest:
		return erase(p.remote.StopPodSandbox(ctx, r))
	case *nri.RemovePodSandboxRequest:
		return erase(p.remote.RemovePodSandbox(ctx, r))
	case *nri.CreateContainerRequest:
		return erase(p.remote.CreateContainer(ctx, r))
	case *nri.PostCreateContainerRequest:
		return erase(p.remote.PostCreateContainer(ctx, r))
	case *nri.StartContainerRequest:
		return erase(p.remote.StartContainer(ctx, r))
	case *nri.PostStartContainerRequest:
		return erase(p.remote.PostStartContainer(ctx, r))
	case *nri.UpdateContainerRequest:
		return erase(p.remote.UpdateContainer(ctx, r))
	case *nri.PostUpdateContainerRequest:
		return erase(p.remote.PostUpdateContainer(ctx, r))
	case *nri.StopContainerRequest:
		return erase(p.remote.StopContainer(ctx, r))
	case *nri.RemoveContainerRequest:
		return erase(p.remote.RemoveContainer(ctx, r))
	case *nri.ValidateContainerAdjustmentRequest:
		return erase(p.remote.ValidateContainerAdjustment(ctx, r))
	default:
		return nil, status.Error(grpccodes.Internal, fmt.Sprintf("no method for %s with a %T", event.PrettyName(), req))
	}
}

func erase[M proto.Message](m M, err error) (proto.Message, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}

// hasStateChange reports whether the event was sent as a state change before it got a
// method of its own.
func hasStateChange(event nri.Event) bool {
	switch event {
	case nri.Event_RUN_POD_SANDBOX, nri.Event_STOP_POD_SANDBOX, nri.Event_REMOVE_POD_SANDBOX,
		nri.Event_POST_UPDATE_POD_SANDBOX, nri.Event_POST_CREATE_CONTAINER, nri.Event_START_CONTAINER,
		nri.Event_POST_START_CONTAINER, nri.Event_POST_UPDATE_CONTAINER, nri.Event_REMOVE_CONTAINER:
		return true
	default:
		return false
	}
}

func (p *conn) stateChange(ctx context.Context, event nri.Event, req proto.Message) (proto.Message, error) {
	e := &nri.StateChangeEvent{Event: event}
	if r, ok := req.(interface{ GetPod() *nri.PodSandbox }); ok {
		e.Pod = r.GetPod()
	}
	if r, ok := req.(interface{ GetContainer() *nri.Container }); ok {
		e.Container = r.GetContainer()
	}
	return erase(p.remote.StateChange(ctx, e))
}
