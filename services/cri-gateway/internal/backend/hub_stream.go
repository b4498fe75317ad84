package backend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// Executor does what plugins ask for by themselves.
type Executor interface {
	// ApplyUpdates updates and stops containers and returns the updates that failed.
	ApplyUpdates(ctx context.Context, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error)
}

// Run keeps the standing stream to the hub up until ctx ends, and answers what the hub
// asks on it: the inventory from node, updates and evictions by executor.
func (h *Hub) Run(ctx context.Context, node nodev1.NodeServiceClient, executor Executor) error {
	retry := newBackoff()
	for epoch := uint64(1); ctx.Err() == nil; epoch++ {
		c := &hubStream{hub: h, epoch: epoch, node: node, executor: executor, out: make(chan *nriv1.ConnectRequest)}
		err := c.serve(ctx, retry)
		if h.lost() && ctx.Err() == nil {
			h.log.WarnContext(ctx, "nri-hub lost", slog.Any("error", err))
		}
		retry.wait(ctx)
	}
	return nil
}

// lost notes that the hub is away and reports whether it was there.
func (h *Hub) lost() bool {
	return h.state.update(func(st *hubState) bool {
		if !st.connected {
			return false
		}
		if st.ready {
			st.awaySince = time.Now()
		}
		st.connected, st.ready = false, false
		return true
	})
}

// announced takes over what the hub says of itself.
func (h *Hub) announced(ctx context.Context, epoch uint64, s *nriv1.HubState) {
	h.state.update(func(st *hubState) bool {
		if st.usable() && !s.GetReady() {
			st.awaySince = time.Now()
		}
		st.connected, st.ready = true, s.GetReady()
		st.generation, st.events, st.epoch = s.GetGeneration(), nri.EventMask(s.GetSubscribedEvents()), epoch
		st.guards, st.ignoresAnnotations = s.GetGuards(), s.GetIgnoresAnnotations()
		st.degraded, st.missing = s.GetDegraded(), s.GetMissing()
		st.plugins = s.GetPlugins()
		return true
	})
	events := nri.EventMask(s.GetSubscribedEvents())
	h.log.InfoContext(ctx, "nri-hub announced its state", slog.Uint64("generation", s.GetGeneration()),
		slog.Bool("ready", s.GetReady()), slog.String("events", events.PrettyString()))
}

// hubStream is one standing stream.
type hubStream struct {
	hub      *Hub
	epoch    uint64
	node     nodev1.NodeServiceClient
	executor Executor
	// out carries the messages of all goroutines to the one that may send.
	out chan *nriv1.ConnectRequest
}

// serve holds the stream until it ends and every answer on it is done.
func (c *hubStream) serve(ctx context.Context, retry *backoff) error {
	group, ctx := errgroup.WithContext(ctx)
	stream, err := c.hub.client.Connect(ctx)
	if err != nil {
		return err
	}
	group.Go(func() error { return c.sendAll(ctx, stream) })
	group.Go(func() error {
		hello := &nriv1.Hello{RuntimeName: c.hub.cfg.RuntimeName, RuntimeVersion: c.hub.cfg.RuntimeVersion}
		if err := c.send(ctx, &nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_Hello{Hello: hello}}); err != nil {
			return err
		}
		return c.receiveAll(ctx, stream, group, retry)
	})
	return group.Wait()
}

func (c *hubStream) sendAll(ctx context.Context, stream grpc.BidiStreamingClient[nriv1.ConnectRequest, nriv1.ConnectResponse]) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case m := <-c.out:
			if err := stream.Send(m); err != nil {
				return fmt.Errorf("send to nri-hub: %w", err)
			}
		}
	}
}

func (c *hubStream) send(ctx context.Context, m *nriv1.ConnectRequest) error {
	select {
	case c.out <- m:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// receiveAll dispatches what the hub sends. Answers are worked on aside, so that a state
// is never kept waiting by an inventory or an update.
func (c *hubStream) receiveAll(
	ctx context.Context, stream grpc.BidiStreamingClient[nriv1.ConnectRequest, nriv1.ConnectResponse],
	group *errgroup.Group, retry *backoff,
) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("stream ended by nri-hub: %w", err)
		}
		if err != nil {
			return fmt.Errorf("receive from nri-hub: %w", err)
		}
		switch m := m.GetMessage().(type) {
		case *nriv1.ConnectResponse_State:
			retry.reset()
			c.hub.announced(ctx, c.epoch, m.State)
		case *nriv1.ConnectResponse_InventoryRequest:
			group.Go(func() error { return c.inventory(ctx, m.InventoryRequest.GetRequestId()) })
		case *nriv1.ConnectResponse_UpdateRequest:
			group.Go(func() error { return c.update(ctx, m.UpdateRequest) })
		}
	}
}

// inventory passes sandboxd's snapshot on in the pieces in which it comes.
func (c *hubStream) inventory(ctx context.Context, id uint64) error {
	last := &nriv1.InventoryChunk{RequestId: id}
	err := c.hub.passing.wait(ctx)
	if err == nil {
		err = c.pieces(ctx, id)
	}
	if err != nil {
		c.hub.log.WarnContext(ctx, "no inventory for nri-hub", slog.Any("error", err))
		last.Error = err.Error()
	}
	return c.sendChunk(ctx, last)
}

func (c *hubStream) pieces(ctx context.Context, id uint64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.node.ListInventory(ctx, &nodev1.ListInventoryRequest{})
	if err != nil {
		return err
	}
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		err = c.sendChunk(ctx, &nriv1.InventoryChunk{
			RequestId: id, Pods: piece.GetPods(), Containers: piece.GetContainers(), EndedIds: piece.GetEndedIds(), More: true,
		})
		if err != nil {
			return err
		}
	}
}

func (c *hubStream) sendChunk(ctx context.Context, chunk *nriv1.InventoryChunk) error {
	return c.send(ctx, &nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_Inventory{Inventory: chunk}})
}

func (c *hubStream) update(ctx context.Context, req *nriv1.UpdateRequest) error {
	failed, err := c.executor.ApplyUpdates(ctx, req.GetUpdates(), req.GetEvictions())
	if err != nil {
		c.hub.log.WarnContext(ctx, "updates of a plugin not applied", slog.String("plugin", req.GetPlugin()),
			slog.Any("error", err))
		failed = req.GetUpdates()
	}
	return c.send(ctx, &nriv1.ConnectRequest{Message: &nriv1.ConnectRequest_UpdateResult{
		UpdateResult: &nriv1.UpdateResult{RequestId: req.GetRequestId(), Failed: failed},
	}})
}
