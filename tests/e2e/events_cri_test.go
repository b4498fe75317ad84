//go:build integration

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// diary is what one follower of container events was told.
type diary struct {
	done chan struct{}

	mu     sync.Mutex
	events []*criv1.ContainerEventResponse
	end    error
}

// follow follows container events from the moment it returns until the stream or ctx ends.
func (s *system) follow(ctx context.Context) *diary {
	t := s.t
	t.Helper()
	d := &diary{done: make(chan struct{})}
	var receive func() (*criv1.ContainerEventResponse, error)
	eventually(t, "container events can be followed", func() error {
		stream, err := s.CRI.GetContainerEvents(ctx, &criv1.GetEventsRequest{})
		if err != nil {
			return err
		}
		// The header comes when the following has begun; without one the call has failed.
		head, err := stream.Header()
		if err == nil && head == nil {
			_, err = stream.Recv()
		}
		receive = stream.Recv
		return err
	})
	go func() {
		defer close(d.done)
		for {
			event, err := receive()
			d.mu.Lock()
			if err != nil {
				d.end = err
				d.mu.Unlock()
				return
			}
			d.events = append(d.events, event)
			d.mu.Unlock()
		}
	}()
	return d
}

// of gives the events of one container or sandbox, so far.
func (d *diary) of(id string) []*criv1.ContainerEventResponse {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(d.events), func(e *criv1.ContainerEventResponse) bool { return e.GetContainerId() != id })
}

func kinds(events []*criv1.ContainerEventResponse) string {
	var names []string
	for _, e := range events {
		names = append(names, strings.TrimSuffix(strings.TrimPrefix(e.GetContainerEventType().String(), "CONTAINER_"), "_EVENT"))
	}
	return strings.Join(names, " ")
}

// expect waits until the events of an id are as wanted, and no others.
func (d *diary) expect(t *testing.T, id, want string) []*criv1.ContainerEventResponse {
	t.Helper()
	eventually(t, "events of "+id, func() error {
		if got := kinds(d.of(id)); got != want {
			return fmt.Errorf("got %q, want %q", got, want)
		}
		return nil
	})
	return d.of(id)
}

// ended waits for the end of the stream and gives its code.
func (d *diary) ended(t *testing.T) codes.Code {
	t.Helper()
	select {
	case <-d.done:
	case <-time.After(20 * time.Second):
		t.Fatal("the stream does not end")
	}
	return status.Code(d.end)
}

const (
	wholeLifeCRI = "CREATED STARTED STOPPED DELETED"
	neverRan     = "CREATED STOPPED DELETED"
)

// Followers are told of each step of pods and containers, with the statuses.
func TestContainerEventsTellTheWholeLife(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	d := s.follow(ctx)
	pod, config := s.pod("told")
	quick := s.container(pod, config, containerConfig("quick", "exit 3"))
	slow := s.container(pod, config, containerConfig("slow", "sleep 600"))
	d.expect(t, quick, "CREATED STARTED STOPPED")
	broken := containerConfig("broken", "")
	broken.Command = []string{"/no/such/program"}
	created, err := s.CRI.CreateContainer(ctx, &criv1.CreateContainerRequest{PodSandboxId: pod, Config: broken, SandboxConfig: config})
	must(t, err)
	if _, err := s.CRI.StartContainer(ctx, &criv1.StartContainerRequest{ContainerId: created.GetContainerId()}); err == nil {
		t.Error("a program that does not exist was started")
	}
	_, err = s.CRI.StopContainer(ctx, &criv1.StopContainerRequest{ContainerId: slow})
	must(t, err)
	d.expect(t, slow, "CREATED STARTED STOPPED") // stopping removes nothing
	_, err = s.CRI.RemoveContainer(ctx, &criv1.RemoveContainerRequest{ContainerId: quick})
	must(t, err)
	_, err = s.CRI.StopPodSandbox(ctx, &criv1.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	d.expect(t, pod, "CREATED STARTED STOPPED")
	_, err = s.CRI.RemovePodSandbox(ctx, &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)

	for id, want := range map[string]string{quick: wholeLifeCRI, slow: wholeLifeCRI, created.GetContainerId(): neverRan, pod: wholeLifeCRI} {
		events := d.expect(t, id, want)
		for i, e := range events {
			if e.GetPodSandboxStatus().GetMetadata().GetUid() != config.GetMetadata().GetUid() || e.GetCreatedAt() == 0 {
				t.Errorf("event %d of %s lacks sandbox or time: %v", i, id, e)
			}
			if i > 0 && e.GetCreatedAt() < events[i-1].GetCreatedAt() {
				t.Errorf("event %d of %s is older than the one before", i, id)
			}
		}
	}
	for _, e := range d.of(quick) {
		mine := slices.IndexFunc(e.GetContainersStatuses(), func(c *criv1.ContainerStatus) bool { return c.GetId() == quick })
		gone := e.GetContainerEventType() == criv1.ContainerEventType_CONTAINER_DELETED_EVENT
		if gone != (mine < 0) {
			t.Errorf("%v has the statuses %v", e.GetContainerEventType(), e.GetContainersStatuses())
			continue
		}
		if e.GetContainerEventType() == criv1.ContainerEventType_CONTAINER_STOPPED_EVENT {
			if c := e.GetContainersStatuses()[mine]; c.GetExitCode() != 3 || c.GetImage().GetImage() != busybox {
				t.Errorf("status at the end is %v", c)
			}
		}
	}
}

// Readers who come and go, and a restart of sandboxd, take nothing from a steady one.
func TestContainerEventsSurviveSandboxdAndOtherReaders(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	steady := s.follow(ctx)
	var fickle sync.WaitGroup
	fickle.Go(func() {
		for ctx.Err() == nil {
			once, end := context.WithTimeout(ctx, 20*time.Millisecond)
			if stream, err := s.CRI.GetContainerEvents(once, &criv1.GetEventsRequest{}); err == nil {
				_, _ = stream.Recv()
			}
			end()
		}
	})
	pod, config := s.pod("steady")
	var ids []string
	for i := range 12 {
		ids = append(ids, s.container(pod, config, containerConfig(fmt.Sprintf("c%d", i), fmt.Sprintf("sleep 1; exit %d", i))))
		if i == 6 {
			must(t, s.Restart(ctx, testenv.Sandboxd))
		}
	}
	for _, id := range ids {
		s.waitExit(id)
		_, err := s.CRI.RemoveContainer(ctx, &criv1.RemoveContainerRequest{ContainerId: id})
		must(t, err)
	}
	for _, id := range ids {
		steady.expect(t, id, wholeLifeCRI)
	}
	cancel()
	fickle.Wait()
	<-steady.done
}

// Without the bus the streams end, so that kubelet lists, and ends are seen all the same.
func TestContainerEventsEndWithTheBus(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("bus")
	short := s.container(pod, config, containerConfig("short", "sleep 3; exit 5"))
	long := s.container(pod, config, containerConfig("long", "trap 'exit 6' TERM; while :; do sleep 0.1; done"))
	d := s.follow(t.Context())
	must(t, s.Kill(t.Context(), testenv.EventBus))
	if code := d.ended(t); code != codes.Unavailable {
		t.Errorf("the stream ended with %v, want Unavailable", d.end)
	}
	if got := s.waitExit(short).GetExitCode(); got != 5 {
		t.Errorf("exit code %d, want 5", got)
	}
	before := time.Now()
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: long, Timeout: 10})
	must(t, err)
	if took := time.Since(before); took >= 10*time.Second {
		t.Errorf("StopContainer took %v without the bus", took)
	}
	refused, err := s.CRI.GetContainerEvents(t.Context(), &criv1.GetEventsRequest{})
	if err == nil {
		_, err = refused.Recv()
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("following without the bus: %v, want Unavailable", err)
	}
	must(t, s.Run(testenv.EventBus))
	again := s.follow(t.Context())
	for _, id := range []string{short, long} {
		_, err := s.CRI.RemoveContainer(t.Context(), &criv1.RemoveContainerRequest{ContainerId: id})
		must(t, err)
		eventually(t, "removal is told", func() error {
			if got := kinds(again.of(id)); !strings.HasSuffix(got, "DELETED") {
				return fmt.Errorf("got %q", got)
			}
			return nil
		})
	}
	must(t, s.Restart(t.Context(), testenv.Gateway))
	if code := again.ended(t); code != codes.Unavailable {
		t.Errorf("the stream ended with %v, want Unavailable", again.end)
	}
}

// Copies of old events change nothing, and are told to nobody.
func TestCopiesOfEventsAreNoNews(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	d := s.follow(t.Context())
	pod, config := s.pod("copies")
	ended := s.container(pod, config, containerConfig("ended", "exit 7"))
	removed := s.container(pod, config, containerConfig("removed", "exit 8"))
	running := s.container(pod, config, containerConfig("running", "sleep 600"))
	before := s.waitExit(ended)
	s.waitExit(removed)
	_, err := s.CRI.RemoveContainer(t.Context(), &criv1.RemoveContainerRequest{ContainerId: removed})
	must(t, err)
	d.expect(t, ended, "CREATED STARTED STOPPED")
	d.expect(t, removed, wholeLifeCRI)

	if n := s.replay(func(subject string) bool {
		return strings.HasSuffix(subject, "tasks.exit") || strings.HasSuffix(subject, "tasks.start")
	}); n < 5 {
		t.Fatalf("%d events were copied, want those of three containers", n)
	}
	last := s.container(pod, config, containerConfig("last", "exit 9"))
	d.expect(t, last, "CREATED STARTED STOPPED") // behind the copies in the stream
	d.expect(t, ended, "CREATED STARTED STOPPED")
	d.expect(t, removed, wholeLifeCRI)
	d.expect(t, running, "CREATED STARTED")
	after := s.status(ended)
	if before.GetFinishedAt() != after.GetFinishedAt() || before.GetExitCode() != after.GetExitCode() || before.GetReason() != after.GetReason() {
		t.Errorf("status was %v and is %v", before, after)
	}
	if state := s.status(running).GetState(); state != criv1.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the running container is %v", state)
	}
}

// replay publishes copies of the events of the stream, with identities of their own, and
// tells how many.
func (s *system) replay(wanted func(subject string) bool) int {
	t := s.t
	t.Helper()
	reader := s.connect("tail")
	defer reader.Close()
	writer := s.connect("sandboxd")
	defer writer.Close()
	js, err := jetstream.New(reader)
	must(t, err)
	consumer, err := js.OrderedConsumer(t.Context(), "CRISP_EVENTS", jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy})
	must(t, err)
	info, err := consumer.Info(t.Context())
	must(t, err)
	batch, err := consumer.Fetch(int(info.NumPending), jetstream.FetchMaxWait(5*time.Second))
	must(t, err)
	out, err := jetstream.New(writer)
	must(t, err)
	n := 0
	for message := range batch.Messages() {
		if !wanted(message.Subject()) {
			continue
		}
		n++
		_, err := out.PublishMsg(t.Context(), &nats.Msg{Subject: message.Subject(), Data: message.Data()})
		must(t, err)
	}
	if err := batch.Error(); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return n
}

// connect opens a connection to the bus in a role.
func (s *system) connect(role string) *nats.Conn {
	s.t.Helper()
	key, err := nats.NkeyOptionFromSeed(s.BusKey(role))
	must(s.t, err)
	conn, err := nats.Connect("nats://127.0.0.1:4222", key)
	must(s.t, err)
	return conn
}
