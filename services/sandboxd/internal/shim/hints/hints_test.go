package hints

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	eventtypes "github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestForward(t *testing.T) {
	dir, err := os.MkdirTemp("", "ch")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "events.sock")
	got := make(chan string, 10)
	serve := func() (stop func()) {
		l, err := Listen(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(slog.New(slog.DiscardHandler), func(_ context.Context, topic string, event any) {
			if oom, ok := event.(*eventtypes.TaskOOM); ok {
				got <- topic + " " + oom.GetContainerID()
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Serve(ctx, l) }()
		return func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("serve: %v", err)
			}
		}
	}
	// The second server takes the place of the first, as after a restart.
	for _, id := range []string{"a", "b"} {
		stop := serve()
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("socket: %v, %v", st, err)
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		client := ttrpc.NewClient(c)
		events := eventsapi.NewTTRPCEventsClient(client)
		event, err := typeurl.MarshalAnyToProto(&eventtypes.TaskOOM{ContainerID: id})
		if err != nil {
			t.Fatal(err)
		}
		for _, env := range []*types.Envelope{
			nil,
			{Topic: "/tasks/oom"},
			{Topic: "/tasks/oom", Event: &anypb.Any{TypeUrl: "no.such.Type", Value: []byte("x")}},
			{Topic: "/tasks/oom", Event: event},
		} {
			if _, err := events.Forward(t.Context(), &eventsapi.ForwardRequest{Envelope: env}); err != nil {
				t.Errorf("forward %v: %v", env, err)
			}
		}
		if hint := testkit.Receive(t, got); hint != "/tasks/oom "+id {
			t.Errorf("hint %q", hint)
		}
		if err := client.Close(); err != nil {
			t.Error(err)
		}
		stop()
	}
}

// A slow receiver costs hints, not the shim's time.
func TestForwardNeverWaits(t *testing.T) {
	s, err := New(slog.New(slog.DiscardHandler), func(context.Context, string, any) {})
	if err != nil {
		t.Fatal(err)
	}
	event, err := typeurl.MarshalAnyToProto(&eventtypes.TaskOOM{})
	if err != nil {
		t.Fatal(err)
	}
	req := &eventsapi.ForwardRequest{Envelope: &types.Envelope{Event: event}}
	for range queueLength + 5 {
		if _, err := s.Forward(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	if s.Dropped() != 5 {
		t.Errorf("dropped %d", s.Dropped())
	}
}

func TestListenRefusesOtherFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), path); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("listen: %v", err)
	}
}
