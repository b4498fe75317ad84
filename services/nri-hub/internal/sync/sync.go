// Package sync hands the pods and containers of the node to a plugin that joins.
//
// The inventory is cut into messages by size. A plugin must acknowledge each part but
// the last by echoing "more"; one that cannot is refused, because it would work with a
// part of the truth. The time limit grows with the size. The package neither takes the
// inventory nor carries out what the plugin answers.
package sync

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/fit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/join"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

var _ join.Synchronizer = (*Synchronizer)(nil)

// chunkSize is what one message holds, well below what the transport takes.
const chunkSize = 3 << 20

// Synchronizer hands inventories to plugins. It is safe for concurrent use.
type Synchronizer struct {
	log     *slog.Logger
	timeout time.Duration
}

// New makes a Synchronizer. timeout is for an inventory of one message; each further
// message adds as much again.
func New(log *slog.Logger, timeout time.Duration) *Synchronizer {
	return &Synchronizer{log: log, timeout: timeout}
}

// Synchronize sends the inventory and returns the updates that the plugin asks for. A
// timeout above zero replaces the configured one.
func (s *Synchronizer) Synchronize(ctx context.Context, p plug.Plugin, inv plug.Inventory, timeout time.Duration) ([]*nri.ContainerUpdate, error) {
	chunks, slim := fit.Chunks(inv.Pods, inv.Containers, chunkSize)
	for _, id := range slim {
		s.log.WarnContext(ctx, "object too large to be synchronised in full; the plugin gets it without its bulky parts",
			slog.String("plugin", p.Info().ID.String()), slog.String("id", id))
	}
	if timeout <= 0 {
		timeout = s.timeout
	}
	limit := timeout * time.Duration(len(chunks))
	ctx, cancel := context.WithTimeoutCause(ctx, limit,
		fmt.Errorf("no answer to a synchronisation in %d parts within %s: %w", len(chunks), limit, context.DeadlineExceeded))
	defer cancel()
	for i, c := range chunks {
		more := i < len(chunks)-1
		resp, err := p.Synchronize(ctx, &nri.SynchronizeRequest{Pods: c.Pods, Containers: c.Containers, More: more})
		if err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return nil, fmt.Errorf("part %d of %d: %w", i+1, len(chunks), err)
		}
		if !more {
			return resp.GetUpdate(), nil
		}
		if !resp.GetMore() || len(resp.GetUpdate()) > 0 {
			return nil, fmt.Errorf("plugin cannot take a synchronisation in %d parts; it needs a newer NRI version: %w",
				len(chunks), errdefs.ErrNotImplemented)
		}
	}
	return nil, nil
}
