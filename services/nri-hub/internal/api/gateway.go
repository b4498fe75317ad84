package api

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

var _ outward.Gateway = (*gateway)(nil)

// gateway is a connected gateway: it matches answers to the hub's requests.
type gateway struct {
	outbox chan *nriv1.ConnectResponse
	done   chan struct{}

	// mu guards all below.
	mu          sync.Mutex
	lastID      uint64
	inventories map[uint64]*collector
	updates     map[uint64]chan []*nri.ContainerUpdate
}

// collector puts the pieces of an inventory together.
type collector struct {
	inventory plug.Inventory
	result    chan error // of capacity one
}

func newGateway() *gateway {
	return &gateway{
		outbox:      make(chan *nriv1.ConnectResponse),
		done:        make(chan struct{}),
		inventories: make(map[uint64]*collector),
		updates:     make(map[uint64]chan []*nri.ContainerUpdate),
	}
}

func (g *gateway) disconnect() { close(g.done) }

// Done is closed when the gateway is disconnected.
func (g *gateway) Done() <-chan struct{} { return g.done }

// Inventory asks for a snapshot of all pods and containers.
func (g *gateway) Inventory(ctx context.Context) (plug.Inventory, error) {
	c := &collector{result: make(chan error, 1)}
	g.mu.Lock()
	g.lastID++
	id := g.lastID
	g.inventories[id] = c
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.inventories, id)
	}()
	err := g.send(ctx, &nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_InventoryRequest{
		InventoryRequest: &nriv1.InventoryRequest{RequestId: id},
	}})
	if err != nil {
		return plug.Inventory{}, err
	}
	select {
	case err := <-c.result:
		return c.inventory, err
	case <-g.done:
		return plug.Inventory{}, gone()
	case <-ctx.Done():
		return plug.Inventory{}, context.Cause(ctx)
	}
}

// Update asks for changes of containers and returns those that failed.
func (g *gateway) Update(ctx context.Context, plugin string, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error) {
	result := make(chan []*nri.ContainerUpdate, 1)
	g.mu.Lock()
	g.lastID++
	id := g.lastID
	g.updates[id] = result
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.updates, id)
	}()
	err := g.send(ctx, &nriv1.ConnectResponse{Message: &nriv1.ConnectResponse_UpdateRequest{
		UpdateRequest: &nriv1.UpdateRequest{RequestId: id, Plugin: plugin, Updates: updates, Evictions: evictions},
	}})
	if err != nil {
		return nil, err
	}
	select {
	case failed := <-result:
		return failed, nil
	case <-g.done:
		return nil, gone()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (g *gateway) send(ctx context.Context, msg *nriv1.ConnectResponse) error {
	select {
	case g.outbox <- msg:
		return nil
	case <-g.done:
		return gone()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func gone() error { return fmt.Errorf("gateway disconnected: %w", errdefs.ErrUnavailable) }

// receive takes one message of the gateway. Answers that nobody waits for any more are
// dropped.
func (g *gateway) receive(msg *nriv1.ConnectRequest) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch m := msg.GetMessage().(type) {
	case *nriv1.ConnectRequest_Inventory:
		c, ok := g.inventories[m.Inventory.GetRequestId()]
		if !ok {
			return nil
		}
		c.inventory.Pods = append(c.inventory.Pods, m.Inventory.GetPods()...)
		c.inventory.Containers = append(c.inventory.Containers, m.Inventory.GetContainers()...)
		c.inventory.Ended = append(c.inventory.Ended, m.Inventory.GetEndedIds()...)
		var err error
		if text := m.Inventory.GetError(); text != "" {
			err = errors.New(text)
		}
		if err != nil || !m.Inventory.GetMore() {
			delete(g.inventories, m.Inventory.GetRequestId())
			c.result <- err
		}
		return nil
	case *nriv1.ConnectRequest_UpdateResult:
		result, ok := g.updates[m.UpdateResult.GetRequestId()]
		if !ok {
			return nil
		}
		delete(g.updates, m.UpdateResult.GetRequestId())
		result <- m.UpdateResult.GetFailed()
		return nil
	default:
		return fmt.Errorf("gateway sent a %T after its introduction: %w", m, errdefs.ErrInvalidArgument)
	}
}
