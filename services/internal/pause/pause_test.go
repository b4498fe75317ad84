package pause

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		begin := time.Now()
		if !For(ctx, 2*time.Second) || time.Since(begin) != 2*time.Second {
			t.Errorf("waited %s of 2s", time.Since(begin))
		}
		if For(ctx, time.Hour) || time.Since(begin) != 3*time.Second {
			t.Errorf("ended after %s, want the end of the context after 3s", time.Since(begin))
		}
	})
}
