package layerusage_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/layerusage"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// disk counts the walks over it.
type disk struct {
	mu    sync.Mutex
	walks int
	bytes uint64
	took  time.Duration
	err   error
}

func (d *disk) Usage(ctx context.Context, _, _ string) (uint64, uint64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.walks++
	timer := time.NewTimer(d.took)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
	return d.bytes, 1, d.err
}

func (d *disk) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.walks
}

const life = 10 * time.Second

func TestPollsCostNoWalk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{bytes: 7, took: time.Second}
		c := layerusage.New(t.Context(), d, life)
		defer c.Close()
		if got := c.Usage(t.Context(), "k", ""); got.Bytes != 7 || got.At.IsZero() {
			t.Errorf("first figure %v, want to have waited for it", got)
		}
		for range 5 {
			time.Sleep(time.Second)
			c.Usage(t.Context(), "k", "")
		}
		if n := d.count(); n != 1 {
			t.Errorf("%d walks within the life of a figure, want 1", n)
		}
		time.Sleep(life)
		d.bytes = 9
		start := time.Now()
		if got := c.Usage(t.Context(), "k", ""); got.Bytes != 7 || time.Since(start) != 0 {
			t.Errorf("old figure: %v after %v, want the old one at once", got, time.Since(start))
		}
		time.Sleep(2 * time.Second)
		if got := c.Usage(t.Context(), "k", ""); got.Bytes != 9 || d.count() != 2 {
			t.Errorf("new figure %v after %d walks", got, d.count())
		}
	})
}

func TestSlowLayersAreNotWaitedForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := layerusage.New(t.Context(), &disk{took: time.Hour}, life)
		start := time.Now()
		if got := c.Usage(t.Context(), "k", ""); !got.At.IsZero() || time.Since(start) > 5*time.Second {
			t.Errorf("%v after %v", got, time.Since(start))
		}
		c.Close() // ends the walk
		if got := c.Usage(t.Context(), "other", ""); !got.At.IsZero() {
			t.Errorf("after the close: %v", got)
		}
	})
}

func TestErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &disk{err: errors.New("cannot read")}
		c := layerusage.New(t.Context(), d, life)
		defer c.Close()
		if got := c.Usage(t.Context(), "k", ""); !got.At.IsZero() {
			t.Errorf("unreadable: %v", got)
		}
		d.err = nil
		if got := c.Usage(t.Context(), "k", ""); got.At.IsZero() {
			t.Error("not tried again")
		}
		d.err = errdefs.ErrNotFound
		if got := c.Usage(t.Context(), "gone", ""); got.At.IsZero() || got.Bytes != 0 {
			t.Errorf("gone: %v, want nothing in use", got)
		}
	})
}
