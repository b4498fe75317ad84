package plugin

import (
	"context"
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
	resp, err := invoke(ctx, p.remote, event, req)
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

// methods are those of a plugin, however it is reached.
type methods interface {
	RunPodSandbox(context.Context, *nri.RunPodSandboxRequest) (*nri.RunPodSandboxResponse, error)
	UpdatePodSandbox(context.Context, *nri.UpdatePodSandboxRequest) (*nri.UpdatePodSandboxResponse, error)
	PostUpdatePodSandbox(context.Context, *nri.PostUpdatePodSandboxRequest) (*nri.PostUpdatePodSandboxResponse, error)
	StopPodSandbox(context.Context, *nri.StopPodSandboxRequest) (*nri.StopPodSandboxResponse, error)
	RemovePodSandbox(context.Context, *nri.RemovePodSandboxRequest) (*nri.RemovePodSandboxResponse, error)
	CreateContainer(context.Context, *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error)
	PostCreateContainer(context.Context, *nri.PostCreateContainerRequest) (*nri.PostCreateContainerResponse, error)
	StartContainer(context.Context, *nri.StartContainerRequest) (*nri.StartContainerResponse, error)
	PostStartContainer(context.Context, *nri.PostStartContainerRequest) (*nri.PostStartContainerResponse, error)
	UpdateContainer(context.Context, *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error)
	PostUpdateContainer(context.Context, *nri.PostUpdateContainerRequest) (*nri.PostUpdateContainerResponse, error)
	StopContainer(context.Context, *nri.StopContainerRequest) (*nri.StopContainerResponse, error)
	RemoveContainer(context.Context, *nri.RemoveContainerRequest) (*nri.RemoveContainerResponse, error)
	ValidateContainerAdjustment(context.Context, *nri.ValidateContainerAdjustmentRequest) (*nri.ValidateContainerAdjustmentResponse, error)
}

// invoke makes the typed call.
func invoke(ctx context.Context, remote methods, event nri.Event, req proto.Message) (proto.Message, error) {
	switch r := req.(type) {
	case *nri.RunPodSandboxRequest:
		return erase(remote.RunPodSandbox(ctx, r))
	case *nri.UpdatePodSandboxRequest:
		return erase(remote.UpdatePodSandbox(ctx, r))
	case *nri.PostUpdatePodSandboxRequest:
		return erase(remote.PostUpdatePodSandbox(ctx, r))
	case *nri.StopPodSandboxRequest:
		return erase(remote.StopPodSandbox(ctx, r))
	case *nri.RemovePodSandboxRequest:
		return erase(remote.RemovePodSandbox(ctx, r))
	case *nri.CreateContainerRequest:
		return erase(remote.CreateContainer(ctx, r))
	case *nri.PostCreateContainerRequest:
		return erase(remote.PostCreateContainer(ctx, r))
	case *nri.StartContainerRequest:
		return erase(remote.StartContainer(ctx, r))
	case *nri.PostStartContainerRequest:
		return erase(remote.PostStartContainer(ctx, r))
	case *nri.UpdateContainerRequest:
		return erase(remote.UpdateContainer(ctx, r))
	case *nri.PostUpdateContainerRequest:
		return erase(remote.PostUpdateContainer(ctx, r))
	case *nri.StopContainerRequest:
		return erase(remote.StopContainer(ctx, r))
	case *nri.RemoveContainerRequest:
		return erase(remote.RemoveContainer(ctx, r))
	case *nri.ValidateContainerAdjustmentRequest:
		return erase(remote.ValidateContainerAdjustment(ctx, r))
	default:
		return nil, errNoMethod(event, req)
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
