package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// Connect keeps the gateway's standing stream: the hub's state goes out first and after
// each change, and always before a request that was made in that state.
func (s *Service) Connect(stream grpc.BidiStreamingServer[nriv1.ConnectRequest, nriv1.ConnectResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	hello := first.GetHello()
	if hello == nil {
		return fmt.Errorf("first message of the gateway is not its introduction: %w", errdefs.ErrInvalidArgument)
	}
	ctx := stream.Context()
	s.log.InfoContext(ctx, "gateway connected", slog.String("runtime", hello.GetRuntimeName()), slog.String("version", hello.GetRuntimeVersion()))
	gw := newGateway()
	defer gw.disconnect()
	received := make(chan error, 1)
	// It ends when this call has returned, which ends the stream.
	s.readers.Go(func() { received <- read(stream, gw) })
	detach := s.hub.Attach(gw, outward.Runtime{Name: hello.GetRuntimeName(), Version: hello.GetRuntimeVersion()})
	defer detach()
	s.readers.Go(func() { s.hub.Reconcile(ctx, gw) })
	err = s.write(ctx, stream, gw, received)
	s.log.InfoContext(ctx, "gateway disconnected", slog.Any("cause", err))
	return err
}

func read(stream grpc.BidiStreamingServer[nriv1.ConnectRequest, nriv1.ConnectResponse], gw *gateway) error {
	for {
		msg, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := gw.receive(msg); err != nil {
			return err
		}
	}
}

// write sends to the gateway until the stream ends.
func (s *Service) write(ctx context.Context, stream grpc.BidiStreamingServer[nriv1.ConnectRequest, nriv1.ConnectResponse], gw *gateway, received <-chan error) error {
	var sent roster.State
	var changed <-chan struct{}
	announce := func() error {
		var state roster.State
		state, changed = s.hub.State()
		if state == sent {
			return nil
		}
		sent = state
		return stream.Send(&nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_State{State: &nriv1.HubState{
			Generation:       state.Generation,
			SubscribedEvents: int32(state.Events),
			Ready:            state.Ready,
			Guards:           s.guards(),
			Degraded:         names(state.Degraded),
			Missing:          names(state.Missing),
			Plugins:          s.roster(),

			IgnoresAnnotations: !s.hub.Required().Annotations,
		}}})
	}
	for {
		if err := announce(); err != nil {
			return err
		}
		select {
		case <-changed:
		case out := <-gw.outbox:
			// The state may have changed before the request was made.
			if err := announce(); err != nil {
				return err
			}
			if err := stream.Send(out); err != nil {
				return err
			}
		case err := <-received:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// guards are the pods that require plugins. An exemption from some plugins is none from
// the others, so it does not count here.
func (s *Service) guards() []*nriv1.Guard {
	required := s.hub.Required()
	guard := func(p rule.Selector, exempt bool) *nriv1.Guard {
		return &nriv1.Guard{
			Namespaces: p.Namespaces, NotNamespaces: p.NotNamespaces, Labels: p.Labels, Annotations: p.Annotations, Exempt: exempt,
		}
	}
	var list []*nriv1.Guard
	for _, d := range required.Demands {
		list = append(list, guard(d.Pods, false))
	}
	for _, d := range required.Exempt {
		if len(d.Plugins) == 0 {
			list = append(list, guard(d.Pods, true))
		}
	}
	return list
}

func names(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}
