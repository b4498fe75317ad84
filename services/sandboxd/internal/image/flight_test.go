package image

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

func TestFlights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flights
		runs := 0
		work := func(ctx context.Context) (string, error) {
			runs++
			select {
			case <-time.After(time.Minute):
				return "id", nil
			case <-ctx.Done():
				return "", context.Cause(ctx)
			}
		}
		type result struct {
			id  string
			err error
		}
		start := func(ctx context.Context, key string) chan result {
			c := make(chan result, 1)
			go func() {
				id, err := f.do(ctx, key, work)
				c <- result{id, err}
			}()
			return c
		}
		ctx, cancel := context.WithCancel(t.Context())
		first := start(ctx, "a")
		synctest.Wait()
		second := start(t.Context(), "a")
		other := start(t.Context(), "b")
		synctest.Wait()
		cancel()
		if r := <-first; !errors.Is(r.err, context.Canceled) {
			t.Errorf("cancelled caller: %+v", r)
		}
		for _, c := range []chan result{second, other} {
			if r := <-c; r.err != nil || r.id != "id" {
				t.Errorf("other caller: %+v", r)
			}
		}
		if runs != 2 {
			t.Errorf("%d runs", runs)
		}

		ctx, cancel = context.WithCancel(t.Context())
		alone := start(ctx, "a")
		synctest.Wait()
		began := time.Now()
		cancel()
		<-alone
		f.work.Wait()
		if time.Since(began) > 0 {
			t.Error("work went on with nobody waiting")
		}
		if r := <-start(t.Context(), "a"); r.id != "id" {
			t.Errorf("after an abandoned run: %+v", r)
		}

		last := start(t.Context(), "a")
		synctest.Wait()
		f.close()
		if r := <-last; !errdefs.IsUnavailable(r.err) {
			t.Errorf("at close: %+v", r)
		}
		if r := <-start(t.Context(), "a"); !errdefs.IsUnavailable(r.err) {
			t.Errorf("after close: %+v", r)
		}
	})
}
