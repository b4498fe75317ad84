package eventfeed_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	taskevents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/typeurl/v2"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/eventfeed"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// sink notes what it is told, and refuses the first time.
type sink struct {
	// mu guards told.
	mu   sync.Mutex
	told []string
}

func (s *sink) ContainerExited(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.told = append(s.told, id)
	if len(s.told) == 1 {
		return errors.New("not now")
	}
	return nil
}

func envelope(t *testing.T, event any) []byte {
	t.Helper()
	content, err := typeurl.MarshalAny(event)
	if err != nil {
		t.Fatal(err)
	}
	text, err := proto.Marshal(&types.Envelope{
		Namespace: "k8s.io", Topic: "/tasks/exit",
		Event: &anypb.Any{TypeUrl: content.GetTypeUrl(), Value: content.GetValue()},
	})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestExitsAreHandedOver(t *testing.T) {
	tel, _ := testkit.Telemetry(t)
	bus := testkit.NewBus(t)
	bus.Start()
	publisher, err := events.NewPublisher(bus.Config(), tel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(publisher.Close)

	told := &sink{}
	ctx, cancel := context.WithCancel(t.Context())
	var feed sync.WaitGroup
	feed.Go(func() {
		if err := eventfeed.Run(ctx, bus.Config(), tel, told); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		feed.Wait()
	})
	// The place in the stream begins with the newest event, so the first ones may come
	// before the feed is there; they are sent until one arrives.
	n := 0
	testkit.Eventually(t, testkit.Patience, func() error {
		n++
		publish(t, publisher, string(rune('a'+n)), envelope(t, &taskevents.TaskExit{ContainerID: "c", ID: "c"}))
		told.mu.Lock()
		defer told.mu.Unlock()
		if len(told.told) < 2 {
			return errors.New("nothing arrived twice, the first time being refused")
		}
		return nil
	})
	publish(t, publisher, "other", envelope(t, &taskevents.TaskStart{ContainerID: "started"}))
	publish(t, publisher, "exec", envelope(t, &taskevents.TaskExit{ContainerID: "c2", ID: "exec-1"}))
	publish(t, publisher, "last", envelope(t, &taskevents.TaskExit{ContainerID: "last", ID: "last"}))
	testkit.Eventually(t, testkit.Patience, func() error {
		told.mu.Lock()
		defer told.mu.Unlock()
		if !slices.Contains(told.told, "last") {
			return errors.New("the last one did not arrive")
		}
		seen := map[string]bool{}
		for _, id := range told.told {
			seen[id] = true
		}
		if diff := cmp.Diff(map[string]bool{"c": true, "last": true}, seen); diff != "" {
			t.Fatalf("told of (-want +got):\n%s", diff)
		}
		return nil
	})
}

func publish(t *testing.T, p *events.Publisher, id string, text []byte) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		return p.Publish(t.Context(), events.Message{ID: id, Topic: "/tasks/exit", Envelope: text})
	})
}
