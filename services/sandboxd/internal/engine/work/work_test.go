package work

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
)

func TestJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := New(t.Context(), slog.New(slog.DiscardHandler))
		broken := errors.New("broken")
		untilEnd := func(ctx context.Context) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}

		if err := g.Start(t.Context(), time.Hour, func(context.Context) error { return broken }).Wait(t.Context()); !errors.Is(err, broken) {
			t.Errorf("a job that fails: %v", err)
		}
		caller, gone := context.WithCancel(t.Context())
		j := g.Start(caller, time.Minute, untilEnd)
		gone()
		if err := j.Wait(caller); !errors.Is(err, context.Canceled) {
			t.Errorf("wait of a caller that is gone: %v", err)
		}
		if err := j.Wait(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a job beyond its limit, after its caller went away: %v", err)
		}

		j = g.Start(t.Context(), time.Hour, untilEnd)
		if err := j.Cancel(t.Context()); err != nil {
			t.Errorf("cancel: %v", err)
		}
		if err := j.Wait(t.Context()); !errors.Is(err, context.Canceled) {
			t.Errorf("a cancelled job: %v", err)
		}

		j = g.Start(t.Context(), time.Hour, untilEnd)
		g.Close()
		if err := j.Wait(t.Context()); !errdefs.IsUnavailable(err) {
			t.Errorf("a job of a group that was closed: %v", err)
		}
		j = g.Start(t.Context(), time.Hour, untilEnd)
		if err := errors.Join(j.Cancel(t.Context()), (*Job)(nil).Wait(t.Context())); err != nil {
			t.Error(err)
		}
		if err := j.Wait(t.Context()); !errdefs.IsUnavailable(err) {
			t.Errorf("a job of a closed group: %v", err)
		}
	})
}
