package table

import (
	"fmt"

	"github.com/containerd/errdefs"
)

// EnterSession counts an open stream of a gateway session.
func (t *Table) EnterSession(token string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sessions[token]++
}

// LeaveSession takes back EnterSession.
func (t *Table) LeaveSession(token string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sessions[token]--
	if t.sessions[token] <= 0 {
		delete(t.sessions, token)
	}
}

// SessionOpen says whether a stream of the session is open.
func (t *Table) SessionOpen(token string) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.sessions[token] > 0
}

// CheckSession refuses a token that no stream holds: what it prepares would never be
// aborted. Errors: ErrUnavailable.
func (t *Table) CheckSession(token string) error {
	if !t.SessionOpen(token) {
		return fmt.Errorf("session is not open: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// PreparationLost is the error of a commit of what is not known: only what was prepared is
// committed, so that a restart, or the end of the session, has undone it. Who asked for the
// object gets it by asking again.
func PreparationLost(err error) error {
	return fmt.Errorf("its preparation was lost: %w: %s", errdefs.ErrUnavailable, err.Error())
}

// Prepared returns the ids of what a session prepared and did not commit.
func (t *Table) Prepared(token string) (sandboxes, containers []string) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for id, s := range t.sandboxes {
		if s.Session == token && s.Record().GetState() == SandboxPreparing {
			sandboxes = append(sandboxes, id)
		}
	}
	for id, c := range t.containers {
		if c.Session == token && c.Record().GetState() == ContainerPreparing {
			containers = append(containers, id)
		}
	}
	return sandboxes, containers
}
