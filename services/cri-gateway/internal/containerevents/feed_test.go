package containerevents_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/backendtest"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/containerevents"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// watcher counts followers.
type watcher struct{ following, cut atomic.Int64 }

func (w *watcher) Following(n int) { w.following.Store(int64(n)) }
func (w *watcher) Cut()            { w.cut.Add(1) }

// service serves the events of a feed over the wire, as the gateway does.
type service struct {
	criv1.UnimplementedRuntimeServiceServer
	feed *containerevents.Feed
}

func (s *service) GetContainerEvents(_ *criv1.GetEventsRequest, stream grpc.ServerStreamingServer[criv1.ContainerEventResponse]) error {
	follower, err := s.feed.Follow(stream.Context())
	if err != nil {
		return err
	}
	defer follower.Close()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	return follower.Copy(stream.Context(), stream.Send)
}

// bench is a running feed on a sandboxd in memory.
type bench struct {
	t        *testing.T
	feed     *containerevents.Feed
	sandboxd *backendtest.Sandboxd
	cri      criv1.RuntimeServiceClient
	watcher  *watcher
	changes  chan containerevents.Change
	bus      atomic.Bool
	stop     func()
}

func newBench(t *testing.T) *bench {
	t.Helper()
	tel, _ := testkit.TelemetryTo(t, discard{})
	b := &bench{t: t, sandboxd: backendtest.NewSandboxd(&backendtest.Journal{}), watcher: &watcher{}, changes: make(chan containerevents.Change)}
	b.bus.Store(true)
	sandboxd := backend.NewSandboxd(testkit.GRPC(t, tel, b.sandboxd.Registrations()...), testkit.Patience)
	ctx, cancel := context.WithCancel(t.Context())
	b.feed = containerevents.New(containerevents.Parts{
		Sandboxes: sandboxd.Sandboxes, Containers: sandboxd.Containers,
		Source: func(ctx context.Context, sink containerevents.Sink) error {
			for {
				select {
				case c := <-b.changes:
					if err := sink.Changed(ctx, c); err != nil && ctx.Err() == nil {
						t.Errorf("change %v: %v", c, err)
					}
				case <-ctx.Done():
					return nil
				}
			}
		},
		Connected: b.bus.Load, Observer: b.watcher, Log: slog.New(slog.DiscardHandler),
	})
	b.cri = criv1.NewRuntimeServiceClient(testkit.GRPC(t, tel, rpc.Service(&criv1.RuntimeService_ServiceDesc, &service{feed: b.feed})))
	var run sync.WaitGroup
	run.Go(func() {
		if err := b.feed.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	b.stop = sync.OnceFunc(func() {
		cancel()
		run.Wait()
	})
	t.Cleanup(b.stop)
	return b
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// follow opens a stream and waits until it gets all events.
func (b *bench) follow() grpc.ServerStreamingClient[criv1.ContainerEventResponse] {
	b.t.Helper()
	var stream grpc.ServerStreamingClient[criv1.ContainerEventResponse]
	testkit.Eventually(b.t, testkit.Patience, func() error {
		var err error
		if stream, err = b.cri.GetContainerEvents(b.t.Context(), &criv1.GetEventsRequest{}); err != nil {
			return err
		}
		head, err := stream.Header()
		if err == nil && head == nil {
			return errors.New("refused")
		}
		return err
	})
	return stream
}

// tell brings changes of one id.
func (b *bench) tell(id string, kinds ...containerevents.Kind) {
	for _, kind := range kinds {
		b.changes <- containerevents.Change{Kind: kind, ID: id, At: time.Unix(1, int64(kind))}
	}
}

// expect receives as many events as are wanted and compares.
func expect(t *testing.T, stream grpc.ServerStreamingClient[criv1.ContainerEventResponse], want ...string) []*criv1.ContainerEventResponse {
	t.Helper()
	var all []*criv1.ContainerEventResponse
	var got []string
	for range want {
		e, err := stream.Recv()
		if err != nil {
			t.Fatalf("after %v: %v", got, err)
		}
		all = append(all, e)
		got = append(got, text(e))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("events (-want +got):\n%s", diff)
	}
	return all
}

func text(e *criv1.ContainerEventResponse) string {
	kind := strings.TrimSuffix(strings.TrimPrefix(e.GetContainerEventType().String(), "CONTAINER_"), "_EVENT")
	return e.GetContainerId() + " " + kind
}

const sandboxID, first, second = "sandbox", "first", "second"

func TestLifeIsToldOnceAndInOrder(t *testing.T) {
	b := newBench(t)
	b.sandboxd.AddContainer(sandboxID, "there-before")
	stream := b.follow()
	b.sandboxd.AddContainer(sandboxID, first)
	b.sandboxd.SetState(first, criv1.ContainerState_CONTAINER_EXITED) // as far as it will come

	created := containerevents.Change{Kind: containerevents.ContainerCreated, ID: first, SandboxID: sandboxID, At: time.Unix(2, 0)}
	b.changes <- created
	b.changes <- created // delivered again
	b.tell(first, containerevents.ContainerStarted, containerevents.ContainerStopped, containerevents.ContainerStopped, containerevents.ContainerStarted)
	b.tell("unknown", containerevents.ContainerStopped, containerevents.ContainerDeleted, containerevents.SandboxStopped)
	b.tell("there-before", containerevents.ContainerStarted) // known from the list
	b.sandboxd.SetState("there-before", criv1.ContainerState_CONTAINER_EXITED)
	b.tell("there-before", containerevents.ContainerStopped)
	b.sandboxd.Remove(first)
	b.tell(first, containerevents.ContainerDeleted, containerevents.ContainerDeleted, containerevents.ContainerStopped)
	all := expect(t, stream, "first CREATED", "first STARTED", "first STOPPED", "there-before STOPPED", "first DELETED")

	if at := all[0].GetCreatedAt(); at != time.Unix(2, 0).UnixNano() {
		t.Errorf("created at %d, want the event's own time", at)
	}
	for i, e := range all {
		if e.GetPodSandboxStatus().GetId() != sandboxID {
			t.Errorf("event %d has the sandbox status %v", i, e.GetPodSandboxStatus())
		}
	}
	if got := len(all[2].GetContainersStatuses()); got != 2 {
		t.Errorf("%d container statuses at the end, want those of both containers", got)
	}
	if got := len(all[4].GetContainersStatuses()); got != 1 {
		t.Errorf("%d container statuses after the removal, want the one left", got)
	}
}

func TestSandboxes(t *testing.T) {
	b := newBench(t)
	stream := b.follow()
	b.sandboxd.AddContainer(sandboxID, first)
	b.tell(sandboxID, containerevents.SandboxStarted, containerevents.SandboxStarted)
	b.tell(sandboxID, containerevents.SandboxStopped) // sandboxd shows it ready: not true
	b.sandboxd.Remove(first)
	b.sandboxd.Remove(sandboxID)
	b.tell(sandboxID, containerevents.SandboxStopped, containerevents.SandboxDeleted, containerevents.SandboxDeleted)
	all := expect(t, stream, "sandbox CREATED", "sandbox STARTED", "sandbox STOPPED", "sandbox DELETED")
	last := all[3].GetPodSandboxStatus()
	if last.GetId() != sandboxID || last.GetState() != criv1.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("status after the removal is %v, want the last one, not ready", last)
	}
}

// The state of a container may show a moment after its event.
func TestEventsWaitForTheState(t *testing.T) {
	b := newBench(t)
	b.sandboxd.AddContainer(sandboxID, first)
	stream := b.follow()
	b.tell(first, containerevents.ContainerStopped)
	b.sandboxd.SetState(first, criv1.ContainerState_CONTAINER_EXITED)
	all := expect(t, stream, "first STOPPED")
	if state := all[0].GetContainersStatuses()[0].GetState(); state != criv1.ContainerState_CONTAINER_EXITED {
		t.Errorf("state %v, want exited", state)
	}
}

// An event that the runtime contradicts is dropped, and the true one still comes.
func TestForgedExitIsDropped(t *testing.T) {
	b := newBench(t)
	b.sandboxd.AddContainer(sandboxID, first)
	b.sandboxd.AddContainer(sandboxID, second)
	stream := b.follow()
	b.tell(first, containerevents.ContainerStopped)
	b.sandboxd.SetState(second, criv1.ContainerState_CONTAINER_EXITED)
	b.tell(second, containerevents.ContainerStopped)
	expect(t, stream, "second STOPPED")
	b.sandboxd.SetState(first, criv1.ContainerState_CONTAINER_EXITED)
	b.tell(first, containerevents.ContainerStopped)
	expect(t, stream, "first STOPPED")
}

// A sandboxd that is away holds events up, and loses none.
func TestSandboxdAway(t *testing.T) {
	b := newBench(t)
	b.sandboxd.AddContainer(sandboxID, first)
	stream := b.follow()
	b.sandboxd.SetState(first, criv1.ContainerState_CONTAINER_EXITED)
	b.sandboxd.Failures.Fail("GetSandbox", errdefs.ErrUnavailable, errdefs.ErrUnavailable)
	b.tell(first, containerevents.ContainerStopped)
	expect(t, stream, "first STOPPED")
}

func TestFollowersAreCutOff(t *testing.T) {
	for name, lose := range map[string]func(b *bench){
		"bus away":     func(b *bench) { b.bus.Store(false) },
		"gap":          func(b *bench) { b.tell("", containerevents.Gap) },
		"process ends": func(b *bench) { b.stop() },
		"sandboxd answers nonsense": func(b *bench) {
			b.sandboxd.AddContainer(sandboxID, first)
			b.sandboxd.Failures.Fail("GetSandbox", errdefs.ErrInternal)
			b.changes <- containerevents.Change{Kind: containerevents.ContainerCreated, ID: first, SandboxID: sandboxID}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			stream := b.follow()
			lose(b)
			if _, err := stream.Recv(); !errdefs.IsUnavailable(err) {
				t.Errorf("got %v, want Unavailable", err)
			}
		})
	}
}

func TestNobodyFollowsWithoutABus(t *testing.T) {
	b := newBench(t)
	b.bus.Store(false)
	if _, err := b.feed.Follow(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("bus away: %v, want Unavailable", err)
	}
	if _, err := (containerevents.None{}).Follow(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("no bus: %v, want FailedPrecondition", err)
	}
}

// A fast follower, one that does not read and one that comes and goes do not disturb each
// other.
func TestFollowersAreIndependent(t *testing.T) {
	b := newBench(t)
	const n, ahead, crowd = 400, 100, 40
	for i := range crowd {
		b.sandboxd.AddContainer(sandboxID, fmt.Sprintf("before-%d", i)) // makes the events large
	}
	fast, stalled := b.follow(), b.follow()
	ctx, cancel := context.WithCancel(t.Context())
	var fickle sync.WaitGroup
	fickle.Go(func() {
		for ctx.Err() == nil {
			once, end := context.WithCancel(ctx)
			if stream, err := b.cri.GetContainerEvents(once, &criv1.GetEventsRequest{}); err == nil {
				_, _ = stream.Header()
			}
			end()
			time.Sleep(5 * time.Millisecond)
		}
	})
	// The changes are never so far ahead of the fast follower that it is too slow.
	lead := make(chan struct{}, ahead)
	var feeding sync.WaitGroup
	feeding.Go(func() {
		for i := range n {
			lead <- struct{}{}
			id := fmt.Sprintf("c%d", i)
			b.changes <- containerevents.Change{Kind: containerevents.ContainerCreated, ID: id, SandboxID: sandboxID}
			b.tell(id, containerevents.ContainerStarted, containerevents.ContainerStopped, containerevents.ContainerDeleted)
		}
	})
	for i := range n {
		id := fmt.Sprintf("c%d", i)
		expect(t, fast, id+" CREATED", id+" STARTED", id+" STOPPED", id+" DELETED")
		<-lead
	}
	feeding.Wait()
	cancel()
	fickle.Wait()
	if b.watcher.cut.Load() != 1 {
		t.Fatalf("%d followers were cut off, want the one that does not read", b.watcher.cut.Load())
	}
	var err error
	got := 0
	for err == nil {
		if _, err = stalled.Recv(); err == nil {
			got++
		}
	}
	if !errdefs.IsResourceExhausted(err) || got >= 4*n {
		t.Errorf("the stalled follower got %d events and then %v, want ResourceExhausted before the end", got, err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if f := b.watcher.following.Load(); f != 1 {
			return fmt.Errorf("%d follow, want 1", f)
		}
		return nil
	})
	before := runtime.NumGoroutine()
	for range 200 {
		once, end := context.WithCancel(t.Context())
		stream, err := b.cri.GetContainerEvents(once, &criv1.GetEventsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Header(); err != nil {
			t.Fatal(err)
		}
		end()
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if now := runtime.NumGoroutine(); now > before+5 {
			return fmt.Errorf("%d goroutines, %d before", now, before)
		}
		return nil
	})
}
