package adaptationtest

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// gateway is the gateway's standing stream.
type gateway struct {
	of         *Adaptation
	stream     grpc.BidiStreamingClient[nriv1.ConnectRequest, nriv1.ConnectResponse]
	generation atomic.Uint64
	events     atomic.Int32 // that somebody listens to
	cancel     context.CancelFunc
	serving    sync.WaitGroup

	// sending guards the sending side of the stream.
	sending sync.Mutex
}

// connect opens the stream and returns after the hub has announced itself.
func connect(a *Adaptation) (*gateway, error) {
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := a.client.Connect(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	g := &gateway{of: a, stream: stream, cancel: cancel}
	g.send(&nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_Hello{
		Hello: &nriv1.Hello{RuntimeName: a.name, RuntimeVersion: a.version},
	}})
	first, err := stream.Recv()
	if err != nil {
		cancel()
		return nil, err
	}
	if first.GetState() == nil {
		cancel()
		return nil, fmt.Errorf("hub began with a %T", first.GetMessage())
	}
	g.learn(first.GetState())
	g.serving.Go(func() { g.serve(ctx) })
	return g, nil
}

func (g *gateway) learn(s *nriv1.HubState) {
	g.generation.Store(s.GetGeneration())
	g.events.Store(s.GetSubscribedEvents())
}

func (g *gateway) disconnect() {
	g.cancel()
	g.serving.Wait()
}

// send gives up silently when the stream has ended: serve sees that too.
func (g *gateway) send(m *nriv1.ConnectRequest) {
	g.sending.Lock()
	defer g.sending.Unlock()
	_ = g.stream.Send(m)
}

func (g *gateway) serve(ctx context.Context) {
	for {
		m, err := g.stream.Recv()
		if err != nil {
			return
		}
		switch m := m.GetMessage().(type) {
		case *nriv1.ConnectResponse_State:
			g.learn(m.State)
		case *nriv1.ConnectResponse_InventoryRequest:
			g.serving.Go(func() { g.inventory(ctx, m.InventoryRequest.GetRequestId()) })
		case *nriv1.ConnectResponse_UpdateRequest:
			g.serving.Go(func() { g.update(ctx, m.UpdateRequest) })
		}
	}
}

// inventory answers with what the runtime hands to the callback. The updates that a
// plugin answers with come later, as an update request.
func (g *gateway) inventory(ctx context.Context, id uint64) {
	chunk := &nriv1.InventoryChunk{RequestId: id}
	err := g.of.syncFn(ctx, func(_ context.Context, pods []*nri.PodSandbox, containers []*nri.Container) ([]*ContainerUpdate, error) {
		chunk.Pods, chunk.Containers = pods, containers
		return nil, nil
	})
	if err != nil {
		chunk.Error = err.Error()
	}
	g.send(&nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_Inventory{Inventory: chunk}})
}

// update carries updates out. The stream has no place for an error as a whole, so all of
// the updates have failed then.
func (g *gateway) update(ctx context.Context, req *nriv1.UpdateRequest) {
	failed, err := g.of.updateFn(ctx, req.GetUpdates())
	if err != nil {
		failed = req.GetUpdates()
	}
	g.send(&nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_UpdateResult{
		UpdateResult: &nriv1.UpdateResult{RequestId: req.GetRequestId(), Failed: failed},
	}})
}
