// Package pause waits for a while, but no longer than somebody wants it.
package pause

import (
	"context"
	"time"
)

// For waits for d. It returns false at once when ctx ends first, and true after that time.
func For(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
