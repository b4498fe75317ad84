package sandbox

import (
	"context"
	"log/slog"
	"time"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	releaseFirst = time.Second
	releaseMost  = 15 * time.Second
	// releasing is how many owed networks are released at a time. Plugins that hang must
	// leave room for the pods that are stopped meanwhile.
	releasing = 4
)

// OweRelease repeats a CNI DEL in the background until it succeeds.
func (u *UseCases) OweRelease(r *recordv1.NetworkRelease) {
	u.p.Work.Go(func(ctx context.Context) {
		said := ""
		for delay := releaseFirst; pause.For(ctx, delay); delay = min(2*delay, releaseMost) {
			err := u.release(ctx, r)
			switch {
			case err == nil:
				u.p.Log.InfoContext(ctx, "owed network released", slog.String("sandbox_id", r.GetSandboxId()))
				return
			case ctx.Err() == nil && err.Error() != said:
				said = err.Error()
				u.p.Log.WarnContext(ctx, "owed network cannot be released yet", slog.String("sandbox_id", r.GetSandboxId()), slog.Any("error", err))
			}
		}
	})
}

func (u *UseCases) release(ctx context.Context, r *recordv1.NetworkRelease) error {
	err := u.releases.Acquire(ctx, 1)
	if err != nil {
		return err
	}
	defer u.releases.Release(1)
	err = u.p.Network.Detach(ctx, pod.NetworkRequest{
		SandboxID: r.GetSandboxId(), Config: r.GetConfig(), NetnsPath: r.GetNetnsPath(),
	}, r.GetCniResult())
	if err != nil {
		return err
	}
	return u.p.Table.DropRelease(ctx, r.GetSandboxId())
}
