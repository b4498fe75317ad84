package streaming

import (
	"crypto/rand"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

const (
	tokenLife = time.Minute
	maxTokens = 1000
)

// tokens keeps requests until a client comes for them.
type tokens[T any] struct {
	// mu guards waiting.
	mu      sync.Mutex
	waiting map[string]ticket[T]
}

type ticket[T any] struct {
	request T
	expires time.Time
}

func newTokens[T any]() *tokens[T] { return &tokens[T]{waiting: make(map[string]ticket[T])} }

// put stores a request and returns its token. Errors: ResourceExhausted.
func (t *tokens[T]) put(request T) (string, error) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for token, w := range t.waiting {
		if now.After(w.expires) {
			delete(t.waiting, token)
		}
	}
	if len(t.waiting) >= maxTokens {
		return "", fmt.Errorf("%d streaming requests wait for their clients: %w", maxTokens, errdefs.ErrResourceExhausted)
	}
	token := rand.Text()
	t.waiting[token] = ticket[T]{request: request, expires: now.Add(tokenLife)}
	return token, nil
}

// take returns the request of a token, once.
func (t *tokens[T]) take(token string) (T, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w, ok := t.waiting[token]
	delete(t.waiting, token)
	if !ok || time.Now().After(w.expires) {
		var zero T
		return zero, false
	}
	return w.request, true
}
