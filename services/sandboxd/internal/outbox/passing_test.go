package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/containerd/containerd/api/types"
	"google.golang.org/protobuf/proto"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

func TestPassing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bus{}
		var last *recordv1.Event
		p := NewPassing(func(ctx context.Context, e *recordv1.Event) error {
			last = e
			return b.publish(ctx, e)
		}, slog.New(slog.DiscardHandler))
		tell := func(from, to int) {
			for i := from; i < to; i++ {
				p.Tell(t.Context(), "ns", "/images/progress", fmt.Sprint(i), &eventv1.ImageProgress{Image: fmt.Sprint(i)})
			}
		}
		tell(0, passingQueue+10) // nobody publishes yet: the surplus is dropped
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		synctest.Wait()
		if got := b.ids(); len(got) != passingQueue || got[0] != "0" || got[passingQueue-1] != fmt.Sprint(passingQueue-1) {
			t.Errorf("published %q", got)
		}
		var env types.Envelope
		if err := proto.Unmarshal(last.GetEnvelope(), &env); err != nil || env.GetNamespace() != "ns" || env.GetTopic() != "/images/progress" {
			t.Errorf("envelope %v %v", &env, err)
		}
		// What was told while the bus was away does not come later.
		b.set(true)
		tell(100, 105)
		synctest.Wait()
		b.set(false)
		tell(200, 201)
		synctest.Wait()
		if got := b.ids()[passingQueue:]; !slices.Equal(got, []string{"200"}) {
			t.Errorf("published %q", got)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
