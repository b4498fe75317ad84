package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	eventsv1 "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/eventbus/internal/access"
	"github.com/crisp-cri/crisp/services/internal/cli"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/events"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

const (
	limit = testkit.Patience
	// asProgram makes the test binary behave as the program, so that it can be killed.
	asProgram = "CRISP_TEST_AS_PROGRAM"
)

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		if err := cli.Main(context.Background(), Program(), os.Args[1:], os.Stdout, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// bus is a running event bus below a folder of its own.
type bus struct {
	cfg  Config
	file string
	cmd  *exec.Cmd
}

func newBus(t *testing.T, change func(c *Config)) *bus {
	t.Helper()
	dir := t.TempDir()
	cfg := Default()
	cfg.Log.Level = "debug"
	cfg.Admin.Listen = testkit.ReservePort(t)
	cfg.Broker.Listen = testkit.ReservePort(t)
	cfg.Broker.StoreDir = filepath.Join(dir, "store")
	cfg.Access.KeysDir = filepath.Join(dir, "keys")
	cfg.RPC.Socket.Path = filepath.Join(dir, "bus.sock")
	if change != nil {
		change(&cfg)
	}
	b := &bus{cfg: cfg, file: filepath.Join(dir, "bus.toml")}
	b.configure(t)
	return b
}

func (b *bus) configure(t *testing.T) {
	t.Helper()
	var text bytes.Buffer
	if err := config.Dump(&text, b.cfg); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.file, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (b *bus) start(t *testing.T) {
	t.Helper()
	b.cmd = exec.Command(os.Args[0], "run", "--config", b.file)
	b.cmd.Env = append(os.Environ(), asProgram+"=1")
	b.cmd.Stderr = t.Output()
	if err := b.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.kill)
	testkit.Eventually(t, limit, func() error {
		code, body := b.get("/readyz")
		if code != http.StatusOK {
			return errors.New(body)
		}
		return nil
	})
}

// kill ends the process as hard as it can be ended.
func (b *bus) kill() {
	if b.cmd != nil {
		_ = b.cmd.Process.Kill()
		_ = b.cmd.Wait()
		b.cmd = nil
	}
}

func (b *bus) get(path string) (int, string) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get("http://" + b.cfg.Admin.Listen + path)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(body)
}

func (b *bus) client(role access.Role) events.ClientConfig {
	cfg := events.DefaultClientConfig()
	cfg.URL = "nats://" + b.cfg.Broker.Listen
	cfg.Node = "node-1"
	if role != "" {
		cfg.NkeySeedFile = b.cfg.Access.SeedFile(role)
	}
	return cfg
}

func (b *bus) publisher(t *testing.T, role access.Role) *events.Publisher {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	p, err := events.NewPublisher(b.client(role), tel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func (b *bus) tail(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var out bytes.Buffer
	args = append([]string{"tail", "--config", b.file}, args...)
	if err := cli.Main(ctx, Program(), args, &out, t.Output()); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func message(t *testing.T, id, topic string, event proto.Message) events.Message {
	t.Helper()
	inner, err := typeurl.MarshalAnyToProto(event)
	if err != nil {
		t.Fatal(err)
	}
	return enveloped(t, id, topic, inner)
}

func enveloped(t *testing.T, id, topic string, inner *anypb.Any) events.Message {
	t.Helper()
	data, err := proto.Marshal(&types.Envelope{
		Timestamp: timestamppb.New(time.Date(2026, 3, 4, 5, 6, 7, 8e6, time.UTC)),
		Namespace: "k8s.io", Topic: topic, Event: inner,
	})
	if err != nil {
		t.Fatal(err)
	}
	return events.Message{ID: id, Topic: topic, Envelope: data}
}

func exit(t *testing.T, id string) events.Message {
	t.Helper()
	return message(t, id, "/tasks/exit", &eventsv1.TaskExit{ContainerID: "c-" + id, ID: "c-" + id, Pid: 42, ExitStatus: 137})
}

func publish(t *testing.T, p *events.Publisher, messages ...events.Message) {
	t.Helper()
	for _, m := range messages {
		testkit.Eventually(t, limit, func() error { return p.Publish(t.Context(), m) })
	}
}

func TestBusServesHealthAndMetrics(t *testing.T) {
	t.Parallel()
	b := newBus(t, nil)
	b.start(t)
	conn, err := grpc.NewClient("unix:"+b.cfg.RPC.Socket.Path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	resp, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true))
	if err != nil || resp.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("health: got %v, %v", resp.GetStatus(), err)
	}
	_, metrics := b.get("/metrics")
	for _, want := range []string{
		`crisp_eventbus_stream_up{stream="CRISP_EVENTS"} 1`, "crisp_eventbus_stream_messages", "crisp_eventbus_stream_bytes",
		"crisp_eventbus_stream_consumers", "crisp_eventbus_clients",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	for path, mode := range map[string]os.FileMode{
		b.cfg.Access.KeysDir: os.ModeDir | 0o750, b.cfg.Access.SeedFile(access.Tail): 0o640,
	} {
		info, err := os.Stat(path)
		if err != nil || info.Mode() != mode {
			t.Errorf("%s: mode %v, %v, want %v", path, info.Mode(), err, mode)
		}
	}
	if err := b.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
}

func TestAcknowledgedEventsSurviveAKill(t *testing.T) {
	t.Parallel()
	b := newBus(t, nil)
	b.start(t)
	p := b.publisher(t, access.Sandboxd)
	const before, after = 200, 20
	for i := range before {
		publish(t, p, exit(t, fmt.Sprint(i)))
	}
	b.kill()
	b.start(t)
	// What the publisher could not be sure of it sends again: it must not count twice.
	publish(t, p, exit(t, fmt.Sprint(before-1)))
	for i := before; i < before+after; i++ {
		publish(t, p, exit(t, fmt.Sprint(i)))
	}
	lines := strings.Split(strings.TrimSpace(b.tail(t, "--all", "--json", "--count", fmt.Sprint(before+after))), "\n")
	for i, line := range lines {
		var r struct {
			Sequence uint64
			ID       string
		}
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		if r.ID != fmt.Sprint(i) || r.Sequence != uint64(i+1) {
			t.Fatalf("event %d has id %s and sequence %d", i, r.ID, r.Sequence)
		}
	}
}

func TestTailPrints(t *testing.T) {
	t.Parallel()
	b := newBus(t, nil)
	b.start(t)
	publish(t, b.publisher(t, access.Sandboxd),
		message(t, "1", "/tasks/create", &eventsv1.TaskCreate{ContainerID: "c1", Pid: 7}),
		message(t, "2", "/tasks/start", &eventsv1.TaskStart{ContainerID: "c1", Pid: 7}),
		message(t, "3", "/tasks/exit", &eventsv1.TaskExit{ContainerID: "c1", ID: "e1", Pid: 8, ExitStatus: 1}),
		message(t, "4", "/tasks/exit", &eventsv1.TaskExit{ContainerID: "c1", ID: "c1", Pid: 7, ExitStatus: 137}),
		message(t, "5", "/tasks/oom", &eventsv1.TaskOOM{ContainerID: "c1"}),
		message(t, "6", "/tasks/delete", &eventsv1.TaskDelete{ContainerID: "c1", Pid: 7, ExitStatus: 137}),
		message(t, "7", "/sandboxes/create", &eventsv1.SandboxCreate{SandboxID: "s1"}),
		message(t, "8", "/images/create", &eventsv1.ImageCreate{Name: "docker.io/library/x:1"}),
		message(t, "9", "/crisp/gap", &eventv1.Gap{Dropped: 12}),
		enveloped(t, "10", "/other/thing", &anypb.Any{TypeUrl: "nobody.knows", Value: []byte("hi")}),
	)
	when := time.Date(2026, 3, 4, 5, 6, 7, 8e6, time.UTC).Local().Format("2006-01-02T15:04:05.000Z07:00")
	want := strings.Join([]string{
		" 1 /tasks/create container=c1 pid=7",
		" 2 /tasks/start container=c1 pid=7",
		" 3 /tasks/exit container=c1 exec=e1 pid=8 exit=1",
		" 4 /tasks/exit container=c1 pid=7 exit=137",
		" 5 /tasks/oom container=c1",
		" 6 /tasks/delete container=c1 pid=7 exit=137",
		" 7 /sandboxes/create sandbox=s1",
		" 8 /images/create image=docker.io/library/x:1",
		" 9 /crisp/gap dropped=12",
		" 10 /other/thing type=nobody.knows",
	}, "\n"+when) + "\n"
	if diff := cmp.Diff(when+want, b.tail(t, "--all", "--count", "10")); diff != "" {
		t.Error(diff)
	}
	const object = `{"sequence":4,"subject":"crisp.v1.node-1.k8s_io.tasks.exit","id":"4","timestamp":"2026-03-04T05:06:07.008Z",` +
		`"namespace":"k8s.io","topic":"/tasks/exit","type":"containerd.events.TaskExit","event":{"container_id":"c1","id":"c1",` +
		`"pid":7,"exit_status":137}}` + "\n"
	if diff := cmp.Diff(object, b.tail(t, "--from-seq", "4", "--json", "--topic", "tasks.exit", "--count", "1")); diff != "" {
		t.Error(diff)
	}
	if got := b.tail(t, "--from-seq", "10", "--json", "--count", "1"); !strings.Contains(got, `"event":"aGk="`) {
		t.Errorf("unknown type: got %s", got)
	}
	if got := b.tail(t, "--all", "--topic", "tasks.oom,crisp.gap", "--count", "2"); strings.Count(got, "\n") != 2 ||
		!regexp.MustCompile(`(?s)/tasks/oom.*/crisp/gap`).MatchString(got) {
		t.Errorf("two topics: got %s", got)
	}
}

func TestNobodyElseMayConnect(t *testing.T) {
	t.Parallel()
	b := newBus(t, nil)
	b.start(t)
	if nc, err := nats.Connect("nats://" + b.cfg.Broker.Listen); err == nil {
		nc.Close()
		t.Error("a client without a key was let in")
	}
	foreign := access.Config{KeysDir: t.TempDir()}
	if _, err := access.Open(foreign); err != nil {
		t.Fatal(err)
	}
	opt, err := nats.NkeyOptionFromSeed(foreign.SeedFile(access.Sandboxd))
	if err != nil {
		t.Fatal(err)
	}
	if nc, err := nats.Connect("nats://"+b.cfg.Broker.Listen, opt); err == nil {
		nc.Close()
		t.Error("a client with a foreign key was let in")
	}
	opt, err = nats.NkeyOptionFromSeed(b.cfg.Access.SeedFile(access.Tail))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect("nats://"+b.cfg.Broker.Listen, opt, nats.Timeout(limit),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(limit))
	if err != nil {
		t.Fatal(err)
	}
	// What is forbidden has no answer.
	short, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if err := js.DeleteStream(short, events.DefaultStream); err == nil {
		t.Error("a reader deleted the stream")
	}
	short, stop = context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if _, err := js.CreateStream(short, jetstream.StreamConfig{Name: "X", Subjects: []string{"x"}}); err == nil {
		t.Error("a reader created a stream")
	}
	consumer, err := js.CreateConsumer(t.Context(), events.DefaultStream, jetstream.ConsumerConfig{Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteConsumer(t.Context(), events.DefaultStream, consumer.CachedInfo().Name); err != nil {
		t.Errorf("a reader's consumer stays: %v", err)
	}
	reader := b.publisher(t, access.Tail)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := reader.Publish(ctx, exit(t, "forged")); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("a reader published: %v", err)
	}
	if _, metrics := b.get("/metrics"); strings.Contains(metrics, "crisp_eventbus_stream_messages{stream=\"CRISP_EVENTS\"} 1") {
		t.Error("the forged event is stored")
	}
}

func TestNewKeysAreFound(t *testing.T) {
	t.Parallel()
	b := newBus(t, nil)
	// The publisher is there before the keys are.
	p := b.publisher(t, access.Sandboxd)
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := p.Publish(short, exit(t, "a")); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("without a bus: got %v", err)
	}
	b.start(t)
	publish(t, p, exit(t, "a"))
	b.kill()
	if err := os.RemoveAll(b.cfg.Access.KeysDir); err != nil {
		t.Fatal(err)
	}
	b.start(t)
	publish(t, p, exit(t, "b"))
}

func TestStreamSettingsAreBroughtBack(t *testing.T) {
	t.Parallel()
	b := newBus(t, func(c *Config) { c.Stream.MaxMessages = 7 })
	b.start(t)
	p := b.publisher(t, access.Sandboxd)
	for i := range 10 {
		publish(t, p, exit(t, fmt.Sprint(i)))
	}
	if got := b.tail(t, "--all", "--json", "--count", "7"); !strings.HasPrefix(got, `{"sequence":4,`) {
		t.Errorf("the oldest events are still there: %s", got)
	}
	b.kill()
	b.cfg.Stream.MaxMessages = 3
	b.configure(t)
	b.start(t)
	if got := b.tail(t, "--all", "--json", "--count", "3"); !strings.HasPrefix(got, `{"sequence":8,`) {
		t.Errorf("the new limit does not hold: %s", got)
	}
}

func TestExternalBroker(t *testing.T) {
	t.Parallel()
	cluster := testkit.NewBus(t)
	b := newBus(t, func(c *Config) {
		c.Broker.URL = cluster.Config().URL
		c.Access.KeysDir = filepath.Join(c.Access.KeysDir, "unused")
	})
	started := make(chan struct{})
	go func() {
		defer close(started)
		time.Sleep(300 * time.Millisecond)
		cluster.StartEmpty()
	}()
	b.start(t)
	<-started
	if _, err := os.Stat(b.cfg.Access.KeysDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("keys were made for a cluster that is not ours: %v", err)
	}
	publisher := func() *events.Publisher {
		tel, _ := testkit.Telemetry(t)
		p, err := events.NewPublisher(cluster.Config(), tel)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}()
	defer publisher.Close()
	publish(t, publisher, exit(t, "a"))
	if got := b.tail(t, "--all", "--count", "1"); !strings.Contains(got, "container=c-a pid=42 exit=137") {
		t.Errorf("got %s", got)
	}
}

func TestPortInUseEndsTheProcess(t *testing.T) {
	t.Parallel()
	b := newBus(t, nil)
	b.start(t)
	second := newBus(t, func(c *Config) { c.Broker.Listen = b.cfg.Broker.Listen })
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	err := cli.Main(ctx, Program(), []string{"run", "--config", second.file}, io.Discard, t.Output())
	if err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("got %v", err)
	}
}
