package engine

import (
	"context"
	"log/slog"

	"github.com/crisp-cri/crisp/services/internal/pause"
)

// EnterSession opens a gateway's session; the returned function keeps it open until ctx
// ends. When the last stream of a session has ended and none comes back within the grace
// time, everything that the session prepared and did not commit is aborted.
func (e *Engine) EnterSession(ctx context.Context, token string) (hold func()) {
	e.table.EnterSession(token)
	return func() {
		select {
		case <-ctx.Done():
		case <-e.work.Closing():
		}
		e.table.LeaveSession(token)
		e.work.Go(func(ctx context.Context) {
			if !pause.For(ctx, e.cfg.SessionGrace) || e.table.SessionOpen(token) {
				return
			}
			e.abortSession(ctx, token)
		})
	}
}

func (e *Engine) abortSession(ctx context.Context, token string) {
	sandboxes, containers := e.table.Prepared(token)
	for _, id := range containers {
		err := e.Containers.Abort(ctx, id)
		if err != nil {
			e.log.WarnContext(ctx, "container of a lost session cannot be aborted", slog.String("container_id", id), slog.Any("error", err))
		}
	}
	for _, id := range sandboxes {
		err := e.Sandboxes.Abort(ctx, id)
		if err != nil {
			e.log.WarnContext(ctx, "sandbox of a lost session cannot be aborted", slog.String("sandbox_id", id), slog.Any("error", err))
		}
	}
	if len(sandboxes)+len(containers) > 0 {
		e.log.InfoContext(ctx, "lost session aborted", slog.Int("sandboxes", len(sandboxes)), slog.Int("containers", len(containers)))
	}
}
