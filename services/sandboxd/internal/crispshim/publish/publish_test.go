package publish

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/ttrpc"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// service takes events and refuses the first ones.
type service struct {
	got chan *eventsapi.ForwardRequest
}

func (s service) Forward(_ context.Context, r *eventsapi.ForwardRequest) (*emptypb.Empty, error) {
	s.got <- r
	return &emptypb.Empty{}, nil
}

// Events that are published while nobody listens come later, once and in order.
func TestEventsWaitForTheRuntime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	p := New(path, "ns", slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(ctx)
	}()
	const n = 50
	for i := range n {
		p.Publish("/tasks/exit", &events.TaskExit{ContainerID: fmt.Sprint(i)})
	}
	time.Sleep(100 * time.Millisecond)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	s := service{got: make(chan *eventsapi.ForwardRequest, 2*n)}
	eventsapi.RegisterTTRPCEventsService(server, s)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(ctx, l)
	}()
	flush, stop := context.WithTimeout(t.Context(), testkit.Patience)
	defer stop()
	p.Flush(flush)
	cancel()
	<-done
	_ = server.Close()
	<-served
	close(s.got)
	i := 0
	for r := range s.got {
		var e events.TaskExit
		if err := proto.Unmarshal(r.GetEnvelope().GetEvent().GetValue(), &e); err != nil || e.GetContainerID() != fmt.Sprint(i) {
			t.Errorf("event %d: %v, %v", i, &e, err)
		}
		if r.GetEnvelope().GetNamespace() != "ns" || r.GetEnvelope().GetEvent().GetTypeUrl() != "containerd.events.TaskExit" {
			t.Errorf("envelope %v", r.GetEnvelope())
		}
		i++
	}
	if i != n {
		t.Errorf("%d of %d events", i, n)
	}
}

// Beyond the bound the ends of processes are kept and the oldest of the rest are dropped.
func TestBound(t *testing.T) {
	p := New("/none", "ns", slog.New(slog.DiscardHandler))
	p.Publish("/tasks/exit", &events.TaskExit{ContainerID: "a"})
	for range maxWaiting + 5 {
		p.Publish("/tasks/start", &events.TaskStart{ContainerID: "b"})
	}
	p.Publish("/tasks/delete", &events.TaskDelete{ContainerID: "a"})
	if len(p.queue) != maxWaiting || p.dropped != 7 {
		t.Errorf("%d wait, %d dropped", len(p.queue), p.dropped)
	}
	got := []string{p.queue[0].GetTopic(), p.queue[1].GetTopic(), p.queue[maxWaiting-1].GetTopic()}
	if diff := cmp.Diff([]string{"/tasks/exit", "/tasks/start", "/tasks/delete"}, got); diff != "" {
		t.Error(diff)
	}
}
