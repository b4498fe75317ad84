package backend

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
)

// Session is the gateway's session with sandboxd. What is prepared in it is aborted by
// sandboxd when it ends and does not come back, so the same token is used each time.
type Session struct {
	node  nodev1.NodeServiceClient
	token string
	hold  time.Duration
	log   *slog.Logger
	state watched[sessionState]
}

type sessionState struct {
	open      bool
	recovered bool
	since     time.Time // of the last change of open
}

// NewSession returns a session that is not open yet. hold is how long Token waits for a
// session that is away.
func NewSession(node nodev1.NodeServiceClient, hold time.Duration, log *slog.Logger) *Session {
	s := &Session{node: node, token: rand.Text(), hold: hold, log: log}
	s.state.init(sessionState{since: time.Now()})
	return s
}

// Run keeps the session open until ctx ends.
func (s *Session) Run(ctx context.Context) error {
	retry := newBackoff()
	for ctx.Err() == nil {
		err := s.open(ctx, retry)
		if s.lost() && ctx.Err() == nil {
			s.log.WarnContext(ctx, "session with sandboxd lost", slog.Any("error", err))
		}
		retry.wait(ctx)
	}
	return nil
}

// open holds one stream until it ends.
func (s *Session) open(ctx context.Context, retry *backoff) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.node.OpenSession(ctx, &nodev1.OpenSessionRequest{SessionToken: s.token})
	if err != nil {
		return err
	}
	for {
		beat, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return fmt.Errorf("session ended by sandboxd: %w", errdefs.ErrUnavailable)
		}
		if err != nil {
			return err
		}
		retry.reset()
		opened := s.state.update(func(st *sessionState) bool {
			was := *st
			if !st.open {
				st.since = time.Now()
			}
			st.open, st.recovered = true, beat.GetRecovered()
			return *st != was
		})
		if opened {
			s.log.InfoContext(ctx, "session with sandboxd open", slog.Bool("recovered", beat.GetRecovered()))
		}
	}
}

// lost notes that the session is away and reports whether it was there.
func (s *Session) lost() bool {
	return s.state.update(func(st *sessionState) bool {
		if !st.open {
			return false
		}
		*st = sessionState{since: time.Now()}
		return true
	})
}

// Token returns the session's token once the session is open. It waits until the session
// has been away for the hold time, and no longer than ctx. Errors: Unavailable.
func (s *Session) Token(ctx context.Context) (string, error) {
	for {
		st, changed := s.state.get()
		if st.open {
			return s.token, nil
		}
		left := s.hold - time.Since(st.since)
		if left <= 0 {
			return "", fmt.Errorf("no session with sandboxd: %w", errdefs.ErrUnavailable)
		}
		if err := waitChange(ctx, changed, left); err != nil {
			return "", err
		}
	}
}

// Ready returns nil if the session is open and sandboxd has recovered its state.
func (s *Session) Ready(context.Context) error {
	switch st, _ := s.state.get(); {
	case !st.open:
		return fmt.Errorf("no session with sandboxd: %w", errdefs.ErrUnavailable)
	case !st.recovered:
		return fmt.Errorf("sandboxd recovers its state: %w", errdefs.ErrUnavailable)
	}
	return nil
}
