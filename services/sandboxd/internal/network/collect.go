package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sync/semaphore"

	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// collectLimit bounds one collection: nothing is attached or detached meanwhile. It takes
	// a quarter of the time that pods have for their network at most.
	collectLimit = 10 * time.Second
	// idlePause is the time between two looks for a moment in which nothing is attached.
	idlePause = time.Second
)

// gate keeps collections apart from attaching and detaching, as CNI asks for. Who attaches
// or detaches waits for a collection under way; a collection waits for a moment in which
// nobody does, and holds up nobody while it waits.
type gate struct{ passing *semaphore.Weighted }

func newGate() gate { return gate{semaphore.NewWeighted(math.MaxInt64)} }

// enter waits until no collection is under way. Call leave after it returned nil.
func (g gate) enter(ctx context.Context) error {
	err := g.passing.Acquire(ctx, 1)
	if err != nil {
		return fmt.Errorf("wait for the end of a garbage collection of the networks: %w", err)
	}
	return nil
}

func (g gate) leave() { g.passing.Release(1) }

// alone waits for a moment in which nobody is inside and calls fn, keeping others out.
func (g gate) alone(ctx context.Context, fn func()) {
	for !g.passing.TryAcquire(math.MaxInt64) {
		if !pause.For(ctx, idlePause) {
			return
		}
	}
	defer g.passing.Release(math.MaxInt64)
	fn()
}

// Collect tells plugins from time to time which pods there are, so that they release what
// they hold for others: at once, after each change of the configuration, and regularly, until
// ctx ends. What a pod was attached with that does not exist any more is detached. holders
// are the pods that are attached or may be; a pod must be among them before Attach is called
// and until Detach has returned nil.
func (c *CNI) Collect(ctx context.Context, holders func() []pod.NetworkHolder) {
	if c.cfg.CollectInterval <= 0 {
		return
	}
	again := time.NewTicker(c.cfg.CollectInterval)
	defer again.Stop()
	said := ""
	for ctx.Err() == nil {
		select {
		case <-c.changed: // what follows sees the change
		default:
		}
		err := c.collect(ctx, holders)
		switch {
		case err == nil:
			said = ""
		case err.Error() != said:
			said = err.Error()
			c.log.WarnContext(ctx, "garbage of the networks was not collected", slog.Any("error", err))
		}
		select {
		case <-ctx.Done():
		case <-again.C:
		case <-c.changed:
		}
	}
}

func (c *CNI) collect(ctx context.Context, holders func() []pod.NetworkHolder) error {
	ctx, span := c.tracer.Start(ctx, "network.collect")
	defer span.End()
	var orphans []string
	var err error
	c.gate.alone(ctx, func() {
		ctx, cancel := context.WithTimeoutCause(ctx, min(collectLimit, c.cfg.Timeout/4), errors.New("no answer in time"))
		defer cancel()
		held := holders()
		orphans, err = c.orphans(held)
		err = errors.Join(err, c.collectAll(ctx, held, orphans))
	})
	errs := []error{err}
	for _, id := range orphans {
		rec, err := c.recall(id)
		if err == nil {
			err = c.Detach(ctx, pod.NetworkRequest{SandboxID: id, Config: rec.Config.PodSandboxConfig, NetnsPath: rec.Netns}, nil)
		}
		errs = append(errs, err)
		if err == nil {
			c.log.InfoContext(ctx, "orphan removed", slog.String("kind", "network"), slog.String("id", id))
		}
	}
	return errors.Join(errs...)
}

// collectAll runs GC for every network. Orphans are spared: they get a DEL of their own,
// with all that they were attached with.
func (c *CNI) collectAll(ctx context.Context, held []pod.NetworkHolder, orphans []string) error {
	networks := c.everywhere()
	for _, id := range orphans {
		held = append(held, pod.NetworkHolder{SandboxID: id})
	}
	valid := make(map[string][]types.GCAttachment, len(networks))
	for _, h := range held {
		// Who may be attached to a network under one name or another keeps both.
		attached, err := c.attachedTo(h.SandboxID, h.Raw)
		if err != nil {
			attached = networks
		}
		for _, n := range attached {
			valid[n.List.Name] = append(valid[n.List.Name], types.GCAttachment{ContainerID: h.SandboxID, IfName: n.IfName})
		}
	}
	var errs []error
	for _, n := range networks {
		// An empty list is one too, and not the same as none.
		args := &libcni.GCArgs{ValidAttachments: append([]types.GCAttachment{}, valid[n.List.Name]...)}
		err := serious(c.probe.GCNetworkList(ctx, n.List, args))
		if err != nil {
			errs = append(errs, failed(ctx, n.List.Name, err))
		}
	}
	return errors.Join(errs...)
}

// serious takes out of joined errors those of plugins that do not know the command.
func serious(err error) error {
	var all interface{ Unwrap() []error }
	if !errors.As(err, &all) {
		return err
	}
	return errors.Join(slices.DeleteFunc(slices.Clone(all.Unwrap()), unknownCommand)...)
}

// orphans are the pods that are remembered as attached and are not in held.
func (c *CNI) orphans(held []pod.NetworkHolder) ([]string, error) {
	ids, err := c.rememberedIDs()
	if err != nil {
		return nil, err
	}
	known := make(map[string]bool, len(held))
	for _, h := range held {
		known[h.SandboxID] = true
	}
	return slices.DeleteFunc(ids, func(id string) bool { return known[id] }), nil
}
