package operation

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// counts is an observer that counts.
type counts struct{ begun, ended, failed, joined atomic.Int32 }

func (c *counts) Begin(string) func(error) {
	c.begun.Add(1)
	return func(err error) {
		c.ended.Add(1)
		if err != nil {
			c.failed.Add(1)
		}
	}
}

func (c *counts) Join(string) { c.joined.Add(1) }

func newGroup() (*Group, *counts) {
	c := &counts{}
	return New(slog.New(slog.DiscardHandler), c), c
}

func spec(name, fingerprint string) Spec {
	return Spec{Key: Key{Kind: "run", Name: name}, Fingerprint: fingerprint, Limit: time.Minute}
}

func TestDoJoinsWorkInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := newGroup()
		work := func(ctx context.Context) (int32, error) {
			time.Sleep(time.Second)
			return c.begun.Load(), ctx.Err()
		}
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() {
				got, err := Do(t.Context(), g, spec("a", "x"), work)
				if err != nil || got != 1 {
					t.Errorf("Do = %d, %v; want 1, nil", got, err)
				}
			})
		}
		wg.Wait()
		if c.begun.Load() != 1 || c.joined.Load() != 4 {
			t.Errorf("begun %d, joined %d; want 1 and 4", c.begun.Load(), c.joined.Load())
		}
	})
}

func TestDoRefusesOtherFingerprint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := newGroup()
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := Do(t.Context(), g, spec("a", "x"), sleep(time.Second)); err != nil {
				t.Errorf("first Do: %v", err)
			}
		})
		synctest.Wait()
		if _, err := Do(t.Context(), g, spec("a", "y"), sleep(0)); !errdefs.IsAborted(err) {
			t.Errorf("Do with another fingerprint: %v; want Aborted", err)
		}
		wg.Wait()
		if _, err := Do(t.Context(), g, spec("a", "y"), sleep(0)); err != nil {
			t.Errorf("Do after the first ended: %v", err)
		}
	})
}

func TestDoDoesNotJoinWithoutName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := newGroup()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { _, _ = Do(t.Context(), g, spec("", ""), sleep(time.Second)) })
		}
		wg.Wait()
		if c.begun.Load() != 3 {
			t.Errorf("begun %d operations, want 3", c.begun.Load())
		}
	})
}

func TestWorkOutlivesCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := newGroup()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := Do(ctx, g, spec("a", "x"), sleep(10*time.Second))
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Do: %v; want the caller's deadline", err)
		}
		if got, err := Do(t.Context(), g, spec("a", "x"), sleep(0)); err != nil || got != 10*time.Second {
			t.Errorf("retry = %v, %v; want the result of the first work", got, err)
		}
		if c.begun.Load() != 1 {
			t.Errorf("begun %d operations, want 1", c.begun.Load())
		}
	})
}

func TestLimitEndsWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := newGroup()
		start := time.Now()
		_, err := Do(t.Context(), g, spec("a", "x"), func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, context.Cause(ctx)
		})
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Minute {
			t.Errorf("Do: %v after %s; want a deadline after a minute", err, time.Since(start))
		}
	})
}

func TestPanicBecomesError(t *testing.T) {
	g, c := newGroup()
	_, err := Do(t.Context(), g, spec("a", "x"), func(context.Context) (int, error) { panic("oops") })
	if !errdefs.IsInternal(err) {
		t.Errorf("Do: %v; want Internal", err)
	}
	if c.failed.Load() != 1 {
		t.Error("the observer was not told of the failure")
	}
	if got, err := Do(t.Context(), g, spec("a", "x"), sleep(0)); err != nil {
		t.Errorf("Do after a panic = %v, %v; want nil", got, err)
	}
}

func TestCloseWaitsForWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := newGroup()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = Do(t.Context(), g, spec("a", "x"), sleep(5*time.Second)) })
		synctest.Wait()
		if err := g.Close(t.Context(), time.Second); err != nil {
			t.Errorf("Close: %v", err)
		}
		if c.ended.Load() != 1 {
			t.Error("Close returned before the work had ended")
		}
		if _, err := Do(t.Context(), g, spec("b", "x"), sleep(0)); !errdefs.IsUnavailable(err) {
			t.Errorf("Do after Close: %v; want Unavailable", err)
		}
		wg.Wait()
	})
}

func TestCloseCutsWorkShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := newGroup()
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := Do(t.Context(), g, spec("a", "x"), func(ctx context.Context) (int, error) {
				<-ctx.Done()
				return 0, context.Cause(ctx)
			})
			if !errdefs.IsUnavailable(err) {
				t.Errorf("Do: %v; want Unavailable", err)
			}
		})
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if err := g.Close(ctx, time.Minute); err == nil {
			t.Error("Close reported no cut")
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("Close took %s, want the second that the context allowed", took)
		}
		wg.Wait()
	})
}

func sleep(d time.Duration) func(context.Context) (time.Duration, error) {
	return func(context.Context) (time.Duration, error) {
		time.Sleep(d)
		return d, nil
	}
}

// The work knows when its caller stops waiting, and is not bound by it.
func TestWorkKnowsItsCallersDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := newGroup()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		want, _ := ctx.Deadline()
		_, err := Do(ctx, g, spec("a", "x"), func(ctx context.Context) (bool, error) {
			if got, ok := CallerDeadline(ctx); !ok || !got.Equal(want) {
				t.Errorf("deadline is %v, %v; want %v", got, ok, want)
			}
			if own, _ := ctx.Deadline(); own.Equal(want) {
				t.Error("the work is bound by it")
			}
			return true, nil
		})
		if err != nil {
			t.Error(err)
		}
		_, err = Do(t.Context(), g, spec("b", "x"), func(ctx context.Context) (bool, error) {
			if _, ok := CallerDeadline(ctx); ok {
				t.Error("a caller without a deadline has one")
			}
			return true, nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}
