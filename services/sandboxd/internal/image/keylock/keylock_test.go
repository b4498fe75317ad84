package keylock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestKeyLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New()
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Error(err)
			}
		}
		must(l.Lock(t.Context(), "a"))
		must(l.Lock(t.Context(), "b"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := l.Lock(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("second lock: %v", err)
		}
		got := make(chan struct{})
		go func() { must(l.Lock(t.Context(), "a")); close(got) }()
		synctest.Wait()
		l.Unlock("a")
		<-got
		l.Unlock("a")
		l.Unlock("b")
		if len(l.held) != 0 {
			t.Errorf("keys kept: %v", l.held)
		}
	})
}
