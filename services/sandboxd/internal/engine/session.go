package engine

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// sessions counts the open streams of each gateway session.
type sessions struct {
	mu   *sync.Mutex
	open map[string]int // guarded by mu
}

func newSessions() sessions { return sessions{mu: &sync.Mutex{}, open: map[string]int{}} }

func (s sessions) enter(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[token]++
}

func (s sessions) leave(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[token]--
	if s.open[token] <= 0 {
		delete(s.open, token)
	}
}

func (s sessions) isOpen(token string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[token] > 0
}

// EnterSession opens a gateway's session; the returned function keeps it open until ctx
// ends. When the last stream of a session has ended and none comes back within the grace
// time, everything that the session prepared and did not commit is aborted.
func (e *Engine) EnterSession(ctx context.Context, token string) (hold func()) {
	e.sessions.enter(token)
	return func() {
		select {
		case <-ctx.Done():
		case <-e.life.Done():
		}
		e.sessions.leave(token)
		e.background(func(ctx context.Context) {
			if !pause(ctx, e.cfg.SessionGrace) || e.sessions.isOpen(token) {
				return
			}
			e.abortSession(ctx, token)
		})
	}
}

// checkSession refuses a token that no stream holds: what it prepares would never be aborted.
func (e *Engine) checkSession(token string) error {
	if !e.sessions.isOpen(token) {
		return fmt.Errorf("session is not open: %w", errdefs.ErrUnavailable)
	}
	return nil
}

func (e *Engine) abortSession(ctx context.Context, token string) {
	e.mu.RLock()
	var sbs, cts []string
	for id, s := range e.sandboxes {
		if s.session == token && s.rec.Load().GetState() == recordv1.SandboxState_SANDBOX_STATE_PREPARING {
			sbs = append(sbs, id)
		}
	}
	for id, c := range e.containers {
		if c.session == token && c.rec.Load().GetState() == recordv1.ContainerState_CONTAINER_STATE_PREPARING {
			cts = append(cts, id)
		}
	}
	e.mu.RUnlock()
	for _, id := range cts {
		err := e.AbortContainer(ctx, id)
		if err != nil {
			e.log.WarnContext(ctx, "container of a lost session cannot be aborted", slog.String("container_id", id), slog.Any("error", err))
		}
	}
	for _, id := range sbs {
		err := e.AbortSandbox(ctx, id)
		if err != nil {
			e.log.WarnContext(ctx, "sandbox of a lost session cannot be aborted", slog.String("sandbox_id", id), slog.Any("error", err))
		}
	}
	if len(sbs)+len(cts) > 0 {
		e.log.InfoContext(ctx, "lost session aborted", slog.Int("sandboxes", len(sbs)), slog.Int("containers", len(cts)))
	}
}

// pause waits for d; false means that ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
