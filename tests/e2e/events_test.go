//go:build integration

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/typeurl/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// news is one event as a consumer of the stream gets it.
type news struct {
	topic     string
	container string
	exit      uint32
	trace     string // traceparent header
	subject   string
}

// readNews gives all task events that the stream holds now, in order.
func (s *system) readNews() ([]news, error) {
	t := s.t
	t.Helper()
	key, err := nats.NkeyOptionFromSeed(s.BusKey("tail"))
	if err != nil {
		return nil, err
	}
	conn, err := nats.Connect("nats://127.0.0.1:4222", key)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return nil, err
	}
	consumer, err := js.OrderedConsumer(t.Context(), "CRISP_EVENTS", jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy})
	if err != nil {
		return nil, err
	}
	info, err := consumer.Info(t.Context())
	if err != nil || info.NumPending == 0 {
		return nil, err
	}
	batch, err := consumer.Fetch(int(info.NumPending), jetstream.FetchMaxWait(5*time.Second))
	if err != nil {
		return nil, err
	}
	var all []news
	for message := range batch.Messages() {
		if n, ok := decode(t, message); ok {
			all = append(all, n)
		}
	}
	return all, batch.Error()
}

func decode(t *testing.T, message jetstream.Msg) (news, bool) {
	t.Helper()
	var envelope types.Envelope
	must(t, proto.Unmarshal(message.Data(), &envelope))
	n := news{topic: envelope.GetTopic(), subject: message.Subject()}
	// Header keys of the trace context are lower case on the wire.
	if values := message.Headers()["traceparent"]; len(values) > 0 {
		n.trace = values[0]
	}
	if !strings.HasPrefix(n.topic, "/tasks/") {
		return n, false
	}
	event, err := typeurl.UnmarshalAny(envelope.GetEvent())
	must(t, err)
	switch e := event.(type) {
	case *eventtypes.TaskCreate:
		n.container = e.GetContainerID()
	case *eventtypes.TaskStart:
		n.container = e.GetContainerID()
	case *eventtypes.TaskExit:
		n.container, n.exit = e.GetContainerID(), e.GetExitStatus()
	case *eventtypes.TaskDelete:
		n.container = e.GetContainerID()
	case *eventtypes.TaskOOM:
		n.container = e.GetContainerID()
	}
	return n, true
}

// waitNews waits until the stream holds as many events of a container as wanted,
// and checks that they are exactly these topics in this order.
func (s *system) waitNews(container string, topics ...string) []news {
	t := s.t
	t.Helper()
	var mine []news
	eventually(t, "events of the container", func() error {
		all, err := s.readNews()
		if err != nil {
			return err
		}
		mine = slices.DeleteFunc(all, func(n news) bool { return n.container != container })
		if len(mine) < len(topics) {
			return fmt.Errorf("the stream holds %v, want %v", mine, topics)
		}
		return nil
	})
	got := make([]string, len(mine))
	for i, n := range mine {
		got[i] = n.topic
	}
	if !slices.Equal(got, topics) {
		t.Errorf("events are %v, want %v", got, topics)
	}
	return mine
}

var wholeLife = []string{"/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete"}

// Each step of a container's life is told once and in order.
func TestEventsComeOnceAndInOrder(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	pod, config := s.pod("events")
	var ids []string
	for i := range 3 {
		ids = append(ids, s.container(pod, config, containerConfig(fmt.Sprintf("c%d", i), fmt.Sprintf("exit %d", i+10))))
	}
	for i, id := range ids {
		s.waitExit(id)
		mine := s.waitNews(id, wholeLife...)
		if exit := mine[2].exit; exit != uint32(i+10) {
			t.Errorf("exit status in the event is %d, want %d", exit, i+10)
		}
		if !strings.HasPrefix(mine[2].subject, "crisp.v1.") || !strings.HasSuffix(mine[2].subject, ".k8s_io.tasks.exit") {
			t.Errorf("subject is %q", mine[2].subject)
		}
	}
	// Removing what has ended tells nothing new.
	_, err := s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	s.waitNews(ids[0], wholeLife...)
}

// However the bus is away while containers end, are stopped, lose their shim and are made, none
// of that waits for it, and it is all told once and in order when the bus is back: by what the
// stream keeps, or, if that is lost, by what was not told before.
func TestBusIsAwayWhileContainersEnd(t *testing.T) {
	again := func(s *system) error { return s.Run(testenv.EventBus) }
	for name, away := range map[string]struct {
		leave, back func(*system) error
		lost        bool // what was told before
	}{
		"killed": {func(s *system) error { return s.Kill(s.t.Context(), testenv.EventBus) }, again, false},
		"killed, its store deleted": {func(s *system) error {
			return errors.Join(s.Kill(s.t.Context(), testenv.EventBus), os.RemoveAll(s.Path("lib", "eventbus", "jetstream")))
		}, again, true},
		"hanging": {
			func(s *system) error { return syscall.Kill(s.Pid(testenv.EventBus), syscall.SIGSTOP) },
			func(s *system) error { return syscall.Kill(s.Pid(testenv.EventBus), syscall.SIGCONT) }, false,
		},
		"away when the others start": {func(s *system) error {
			err := s.Kill(s.t.Context(), testenv.EventBus)
			for _, p := range []testenv.Process{testenv.Sandboxd, testenv.Gateway} {
				err = errors.Join(err, s.Stop(s.t.Context(), p), s.Run(p)) // in good order, which does not wait for the bus
			}
			eventually(s.t, "containers are listed", func() error {
				_, err := s.CRI.ListContainers(s.t.Context(), &criv1.ListContainersRequest{})
				return err
			})
			return err
		}, again, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, testenv.Setup{})
			s.pull(busybox)
			pod, config := s.pod("told-later")
			broken, brokenConfig := s.pod("without-shim")
			const count = 6
			volume := t.TempDir()
			ids := make([]string, count)
			for i := range ids {
				c := containerConfig(fmt.Sprintf("ends%d", i), fmt.Sprintf("while ! test -e /volume/go; do sleep 0.1; done; exit %d", 40+i))
				c.Mounts = []*criv1.Mount{{HostPath: volume, ContainerPath: "/volume"}}
				ids[i] = s.container(pod, config, c)
			}
			stopped := s.container(pod, config, containerConfig("stopped", "trap 'exit 50' TERM; while :; do sleep 0.1; done"))
			orphan := s.container(broken, brokenConfig, containerConfig("orphan", "sleep 1000"))
			s.waitNews(orphan, wholeLife[:2]...)

			must(t, away.leave(s))
			must(t, os.WriteFile(filepath.Join(volume, "go"), nil, 0o644))
			begun := time.Now()
			_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: stopped, Timeout: 20})
			must(t, err)
			shim, err := s.ShimOf(broken)
			must(t, err)
			must(t, syscall.Kill(shim, syscall.SIGKILL))
			made := s.container(pod, config, containerConfig("made", "exit 60"))
			codes := map[string]int32{stopped: 50, made: 60}
			for i, id := range ids {
				codes[id] = int32(40 + i)
			}
			for id, want := range codes {
				if got := s.waitExit(id).GetExitCode(); got != want {
					t.Errorf("exit code %d without the bus, want %d", got, want)
				}
			}
			s.waitExit(orphan)
			if took := time.Since(begun); took > 30*time.Second {
				t.Errorf("it all took %s without the bus", took)
			}
			must(t, away.back(s))
			must(t, s.WaitReady(t.Context()))
			codes[orphan] = 137
			for id, want := range codes {
				told := wholeLife
				if away.lost && id != made {
					told = wholeLife[2:]
				}
				mine := s.waitNews(id, told...)
				if exit := mine[len(mine)-2].exit; exit != uint32(want) {
					t.Errorf("exit status in the event is %d, want %d", exit, want)
				}
			}
		})
	}
}

// A container that uses too much memory is told of as such.
func TestOutOfMemoryIsTold(t *testing.T) {
	testenv.EachHandler(t, tellOutOfMemory)
}

func tellOutOfMemory(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler})
	s.pull(busybox)
	pod, config := s.pod("oom")
	hungry := containerConfig("hungry", "tail /dev/zero")
	hungry.Linux.Resources = &criv1.LinuxContainerResources{MemoryLimitInBytes: 32 << 20, MemorySwapLimitInBytes: 32 << 20}
	id := s.container(pod, config, hungry)
	if status := s.waitExit(id); status.GetReason() != "OOMKilled" || status.GetExitCode() != 137 {
		t.Errorf("reason %q, exit code %d", status.GetReason(), status.GetExitCode())
	}
	eventually(t, "OOM event", func() error {
		all, err := s.readNews()
		if err != nil {
			return err
		}
		for _, n := range all {
			if n.container == id && n.topic == "/tasks/oom" {
				return nil
			}
		}
		return fmt.Errorf("the stream holds no OOM event of %s", id)
	})
}

// What an operator follows on the command line is what happens.
func TestTailFollowsEvents(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd, err := s.EventBus(ctx, "tail", "--json", "--config", s.ConfigFile(testenv.EventBus))
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	lines := &recorder{}
	var wg sync.WaitGroup
	wg.Go(func() { lines.read(out) })
	defer wg.Wait()
	defer cancel()

	pod, config := s.pod("tail")
	id := s.container(pod, config, containerConfig("main", "exit 3"))
	s.waitExit(id)
	eventually(t, "tail shows the container's life", func() error {
		at := 0
		for _, line := range lines.all() {
			if !json.Valid([]byte(line)) {
				t.Fatalf("line is not JSON: %s", line)
			}
			if at < len(wholeLife) && strings.Contains(line, id) && strings.Contains(line, wholeLife[at]) {
				at++
			}
		}
		if at < len(wholeLife) {
			return fmt.Errorf("no %s among %q", wholeLife[at], lines.all())
		}
		return nil
	})
}

type recorder struct {
	mu    sync.Mutex
	lines []string
}

func (r *recorder) read(from io.Reader) {
	in := bufio.NewScanner(from)
	for in.Scan() {
		r.mu.Lock()
		r.lines = append(r.lines, in.Text())
		r.mu.Unlock()
	}
}

func (r *recorder) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.lines)
}
