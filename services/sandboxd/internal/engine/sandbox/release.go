package sandbox

import (
	"context"
	"log/slog"
	"time"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	releaseFirst = time.Second
	releaseMost  = 15 * time.Second
)

// OweRelease repeats a CNI DEL in the background until it succeeds.
func (u *UseCases) OweRelease(r *recordv1.NetworkRelease) {
	u.p.Work.Go(func(ctx context.Context) {
		for delay := releaseFirst; work.Pause(ctx, delay); delay = min(2*delay, releaseMost) {
			err := u.release(ctx, r)
			if err == nil {
				u.p.Log.InfoContext(ctx, "owed network released", slog.String("sandbox_id", r.GetSandboxId()))
				return
			}
			u.p.Log.DebugContext(ctx, "owed network not released yet", slog.String("sandbox_id", r.GetSandboxId()), slog.Any("error", err))
		}
	})
}

func (u *UseCases) release(ctx context.Context, r *recordv1.NetworkRelease) error {
	err := u.p.Network.Detach(ctx, pod.NetworkRequest{
		SandboxID: r.GetSandboxId(), Config: r.GetConfig(), NetnsPath: r.GetNetnsPath(),
	}, r.GetCniResult())
	if err != nil {
		return err
	}
	return u.p.Table.DropRelease(ctx, r.GetSandboxId())
}
