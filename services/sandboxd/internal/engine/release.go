package engine

import (
	"context"
	"log/slog"
	"time"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

const (
	releaseFirst = time.Second
	releaseMost  = 15 * time.Second
)

// oweRelease repeats a CNI DEL in the background until it succeeds.
func (e *Engine) oweRelease(r *recordv1.NetworkRelease) {
	e.mu.Lock()
	e.releases[r.GetSandboxId()] = r
	e.mu.Unlock()
	e.background(func(ctx context.Context) {
		for delay := releaseFirst; pause(ctx, delay); delay = min(2*delay, releaseMost) {
			err := e.release(ctx, r)
			if err == nil {
				e.log.InfoContext(ctx, "owed network released", slog.String("sandbox_id", r.GetSandboxId()))
				return
			}
			e.log.DebugContext(ctx, "owed network not released yet", slog.String("sandbox_id", r.GetSandboxId()), slog.Any("error", err))
		}
	})
}

func (e *Engine) release(ctx context.Context, r *recordv1.NetworkRelease) error {
	err := e.p.Network.Detach(ctx, pod.NetworkRequest{
		SandboxID: r.GetSandboxId(), Config: r.GetConfig(), NetnsPath: r.GetNetnsPath(),
	}, r.GetCniResult())
	if err != nil {
		return err
	}
	err = e.p.Store.Update(ctx, func(tx *store.Tx) error { return tx.DeleteRelease(r.GetSandboxId()) })
	if err != nil {
		return err
	}
	e.mu.Lock()
	delete(e.releases, r.GetSandboxId())
	e.mu.Unlock()
	return nil
}
