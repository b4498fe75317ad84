package afterwards

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend"
)

// slowHub takes a second for each event and notes their order.
type slowHub struct {
	backend.NoHub

	mu   sync.Mutex
	told []string
}

func (*slowHub) Wants(context.Context, ...nri.Event) (bool, error) { return true, nil }

func (h *slowHub) Notify(_ context.Context, e nri.Event, _ *nri.PodSandbox, c *nri.Container) error {
	time.Sleep(time.Second)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told = append(h.told, c.GetId()+" "+e.PrettyName())
	return nil
}

func TestNobodyWaitsForWhatHasHappenedAndTheOrderStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := &slowHub{}
		a := New(hub, slog.New(slog.DiscardHandler))
		pod, other := &nri.PodSandbox{Id: "pod"}, &nri.PodSandbox{Id: "other"}
		tell := func(e nri.Event, p *nri.PodSandbox, id string, want time.Duration) {
			t.Helper()
			begin := time.Now()
			if err := a.Notify(t.Context(), e, p, &nri.Container{Id: id}); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(begin); took != want {
				t.Errorf("%s of %s took %v, want %v", e.PrettyName(), id, took, want)
			}
		}
		tell(nri.Event_POST_CREATE_CONTAINER, pod, "one", 0)
		tell(nri.Event_POST_CREATE_CONTAINER, pod, "two", 0)
		tell(nri.Event_START_CONTAINER, other, "three", time.Second) // not held up by another pod
		tell(nri.Event_START_CONTAINER, pod, "one", 2*time.Second)   // after what was told of its pod, and itself
		tell(nri.Event_POST_START_CONTAINER, pod, "one", 0)
		a.Wait()
		want := []string{"one PostCreateContainer", "two PostCreateContainer", "one StartContainer", "one PostStartContainer"}
		got := slices.DeleteFunc(hub.told, func(s string) bool { return s == "three StartContainer" })
		if !slices.Equal(got, want) {
			t.Errorf("told %q, want %q", got, want)
		}
	})
}

func TestACallerLeavesWhileThePluginsAreStillBeingTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(&slowHub{}, slog.New(slog.DiscardHandler))
		pod := &nri.PodSandbox{Id: "pod"}
		if err := a.Notify(t.Context(), nri.Event_POST_CREATE_CONTAINER, pod, nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := a.CreateContainer(ctx, &nri.CreateContainerRequest{Pod: pod}); err == nil {
			t.Error("no error although the caller's time was over")
		}
		a.Wait()
	})
}
