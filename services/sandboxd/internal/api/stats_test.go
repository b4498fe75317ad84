package api

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/layerusage"
)

// endless is a disk whose layers are never measured to the end.
type endless struct{}

func (endless) Mountpoint(string) string { return "/" }

func (endless) Usage(ctx context.Context, _, _ string) (uint64, uint64, error) {
	<-ctx.Done()
	return 0, 0, ctx.Err()
}

// measured is the cache over that disk.
type measured struct {
	endless
	*layerusage.Cache
}

func (m measured) Usage(ctx context.Context, key, snapshotter string) layerusage.Usage {
	return m.Cache.Usage(ctx, key, snapshotter)
}

// A list waits once for what is not measured, however long it is.
func TestUnmeasuredLayersHoldUpAListOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cache := layerusage.New(t.Context(), endless{}, time.Minute)
		defer cache.Close()
		s := &Stats{layers: measured{Cache: cache}}
		began := time.Now()
		ctx, cancel := patient(t.Context())
		defer cancel()
		for _, id := range []string{"a", "b", "c"} {
			if got := s.layer(ctx, &recordv1.Container{Id: id}); got != nil {
				t.Errorf("layer %s was measured: %v", id, got)
			}
		}
		if took := time.Since(began); took != layerusage.FirstWait {
			t.Errorf("waited for %s, want %s", took, layerusage.FirstWait)
		}
	})
}
