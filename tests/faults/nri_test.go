//go:build integration

package faults

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"google.golang.org/grpc/codes"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// bookkeeper is a plugin that books what is made and frees what is removed, and counts
// what it is told of each object.
type bookkeeper struct {
	create func(*nri.PodSandbox, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error)
	run    func(*nri.PodSandbox) error

	mu     sync.Mutex
	booked map[string]string
	stops  map[string]int
	gone   map[string]int
	syncs  int
	log    []string
	live   stub.Stub
}

func newBookkeeper() *bookkeeper {
	return &bookkeeper{booked: map[string]string{}, stops: map[string]int{}, gone: map[string]int{}}
}

func (b *bookkeeper) note(event, id, name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.log = append(b.log, event+" "+name)
	switch event {
	case "book":
		b.booked[id] = name
	case "stop":
		b.stops[id]++
	case "free":
		b.gone[id]++
		delete(b.booked, id)
	}
}

func (b *bookkeeper) Synchronize(_ context.Context, pods []*nri.PodSandbox, containers []*nri.Container) ([]*nri.ContainerUpdate, error) {
	b.mu.Lock()
	b.syncs++
	b.mu.Unlock()
	for _, p := range pods {
		b.note("book", p.GetId(), "pod "+p.GetName())
	}
	for _, c := range containers {
		b.note("book", c.GetId(), c.GetName())
	}
	return nil, nil
}

func (b *bookkeeper) RunPodSandbox(_ context.Context, p *nri.PodSandbox) error {
	b.note("book", p.GetId(), "pod "+p.GetName())
	if b.run != nil {
		return b.run(p)
	}
	return nil
}

func (b *bookkeeper) StopPodSandbox(_ context.Context, p *nri.PodSandbox) error {
	b.note("stop", p.GetId(), "pod "+p.GetName())
	return nil
}

func (b *bookkeeper) RemovePodSandbox(_ context.Context, p *nri.PodSandbox) error {
	b.note("free", p.GetId(), "pod "+p.GetName())
	return nil
}

func (b *bookkeeper) CreateContainer(_ context.Context, p *nri.PodSandbox, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	b.note("book", c.GetId(), c.GetName())
	if b.create != nil {
		return b.create(p, c)
	}
	return nil, nil, nil
}

func (b *bookkeeper) StopContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) ([]*nri.ContainerUpdate, error) {
	b.note("stop", c.GetId(), c.GetName())
	return nil, nil
}

func (b *bookkeeper) RemoveContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) error {
	b.note("free", c.GetId(), c.GetName())
	return nil
}

func (b *bookkeeper) synchronized() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.syncs
}

// balance is an error unless nothing is booked and each object that was ever booked has
// been freed once and stopped at most once.
func (b *bookkeeper) balance(objects int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.booked) > 0 {
		return fmt.Errorf("still booked: %v (told: %q)", slices.Sorted(maps.Values(b.booked)), b.log)
	}
	if len(b.gone) != objects {
		return fmt.Errorf("%d objects were freed, want %d: %q", len(b.gone), objects, b.log)
	}
	for id, n := range b.gone {
		if n != 1 || b.stops[id] > 1 {
			return fmt.Errorf("object %s was freed %d times and stopped %d times: %q", id, n, b.stops[id], b.log)
		}
	}
	return nil
}

// connect registers the plugin and keeps it registered until the test ends, over
// restarts of the hub.
func (s *system) connect(p any, index, name string, opts ...stub.Option) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan struct{})
	var once sync.Once
	var task sync.WaitGroup
	task.Go(func() {
		for ctx.Err() == nil {
			closed := make(chan struct{})
			st, err := stub.New(p, append([]stub.Option{
				stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx(index), stub.WithPluginName(name),
				stub.WithOnClose(sync.OnceFunc(func() { close(closed) })),
			}, opts...)...)
			if err == nil {
				err = st.Start(ctx)
			}
			if err != nil {
				time.Sleep(50 * time.Millisecond)
				continue
			}
			if b, ok := p.(*bookkeeper); ok {
				b.mu.Lock()
				b.live = st
				b.mu.Unlock()
			}
			once.Do(func() { close(first) })
			select {
			case <-closed:
			case <-ctx.Done():
			}
			st.Stop()
		}
	})
	s.t.Cleanup(func() {
		cancel()
		task.Wait()
	})
	select {
	case <-first:
	case <-time.After(30 * time.Second):
		s.t.Fatal("the plugin does not get registered")
	}
}

// SF-38: whatever ends how, each object's removal is told once, and a stop at most once
// before it, also over restarts.
func TestBooksAreBalanced(t *testing.T) {
	s := start(t, testenv.Setup{})
	b := newBookkeeper()
	s.connect(b, "10", "books")
	objects := 0
	pod := func(name string) (string, *criv1.PodSandboxConfig) {
		config := s.podConfig(name)
		objects++
		return s.pod(config, ""), config
	}
	make := func(pod string, config *criv1.PodSandboxConfig, name, text string) string {
		objects++
		return s.container(pod, config, script(name, text))
	}
	ways, config := pod("ways")
	zero := make(ways, config, "exit-zero", "exit 0")
	one := make(ways, config, "exit-one", "exit 1")
	s.waitExit(zero, patience)
	s.waitExit(one, patience)
	running := make(ways, config, "removed-running", "sleep 1000")
	must(t, s.removeContainer(running))
	bad := script("fails-to-start", "")
	bad.Command = []string{"/no/such/program"}
	id, err := s.create(ways, config, bad)
	must(t, err)
	objects++
	if s.startContainer(id) == nil {
		t.Error("a program that does not exist was started")
	}
	must(t, s.removeContainer(id))

	killed, killedConfig := pod("shim-killed")
	make(killed, killedConfig, "victim", "sleep 1000")
	must(t, syscall.Kill(s.shimOf(killed), syscall.SIGKILL))

	direct, directConfig := pod("removed-directly")
	make(direct, directConfig, "inside", "sleep 1000")

	// Refused after the plugin has booked it: it is told that it is gone.
	s.connect(&refuser{}, "90", "refuser")
	refused := script("refuse-me", "true")
	if _, err := s.create(ways, config, refused); err == nil {
		t.Error("a refused container was made")
	}
	objects++

	for _, victims := range [][]testenv.Process{
		{testenv.Sandboxd}, {testenv.NRIHub}, {testenv.Gateway}, {testenv.NRIHub, testenv.Gateway}, {testenv.NRIHub, testenv.Sandboxd},
	} {
		name := strings.ToLower(strings.ReplaceAll(strings.Trim(fmt.Sprint(victims), "[]"), " ", "-"))
		p, config := pod("over-" + name)
		c := make(p, config, "c-"+name, "sleep 1000")
		attempt := script("again-"+name, "exit 0")
		old := make(p, config, "again-"+name, "exit 0")
		s.waitExit(old, patience)
		for _, v := range victims {
			must(t, s.Kill(t.Context(), v))
		}
		for _, v := range victims {
			must(t, s.Run(v))
		}
		must(t, s.WaitReady(t.Context()))
		must(t, s.removeContainer(old))
		attempt.Metadata.Attempt = 1
		if _, err := s.create(p, config, attempt); err != nil {
			t.Errorf("attempt 1 after %s: %v", name, err)
		}
		objects++
		must(t, s.stopContainer(c, 1))
		must(t, s.removePod(p))
	}
	must(t, s.removePod(direct))
	must(t, s.removePod(killed))
	must(t, s.removePod(ways))
	eventually(t, 60*time.Second, "books are balanced", func() error { return b.balance(objects) })
}

// refuser refuses containers whose name says so.
type refuser struct{}

func (*refuser) CreateContainer(_ context.Context, _ *nri.PodSandbox, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	if c.GetName() == "refuse-me" {
		return nil, nil, errors.New("refused")
	}
	return nil, nil, nil
}

// SF-38: what is removed while the hub is away for long is told when it is back.
func TestRemovalWhileTheHubIsAwayIsToldLater(t *testing.T) {
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Gateway {
			settings.Set("nri.hold", "500ms")
		}
	}})
	b := newBookkeeper()
	s.connect(b, "10", "books")
	config := s.podConfig("away")
	pod := s.pod(config, "")
	s.container(pod, config, script("main", "sleep 1000"))
	must(t, s.Kill(t.Context(), testenv.NRIHub))
	begin := time.Now()
	must(t, s.removePod(pod))
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("the removal took %v without a hub", took)
	}
	must(t, s.Run(testenv.NRIHub))
	eventually(t, patience, "books are balanced", func() error { return b.balance(2) })
}

// SF-39: plugins that die at the worst moments cost no pod and leave nothing behind.
func TestPluginsThatDieUnderLoad(t *testing.T) {
	s := start(t, testenv.Setup{})
	steady := newBookkeeper()
	s.connect(steady, "10", "steady")
	stop := make(chan struct{})
	var load, dying sync.WaitGroup
	// One that dies in the middle of whatever it is asked, again and again.
	dying.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			var conn net.Conn
			moments := []string{"Synchronize", "CreateContainer", "RunPodSandbox"}
			p := &mortal{moment: moments[n%len(moments)], die: func() { _ = conn.Close() }}
			st, err := stub.New(p, stub.WithPluginIdx("50"), stub.WithPluginName("mortal"), stub.WithOnClose(func() {}),
				stub.WithDialer(func(string) (net.Conn, error) {
					c, err := net.Dial("unix", s.NRISocket())
					conn = c
					return c, err
				}))
			if err == nil {
				err = st.Start(context.Background())
			}
			if err == nil {
				select {
				case <-stop:
				case <-time.After(400 * time.Millisecond):
				}
				_ = conn.Close()
				st.Stop()
			}
		}
	})
	before := descriptors(t, s.Pid(testenv.NRIHub))
	var made atomic.Int32
	for worker := range 3 {
		load.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				config := s.podConfig(fmt.Sprintf("load-%d-%d", worker, n))
				id, err := s.try(config, "", 60*time.Second)
				if err != nil {
					t.Errorf("pod: %v", err)
					return
				}
				if _, err := s.create(id, config, script("c", "sleep 1000")); err != nil {
					t.Errorf("container: %v", err)
				}
				if err := s.removePod(id); err != nil {
					t.Errorf("removal: %v", err)
				}
				made.Add(1)
			}
		})
	}
	time.Sleep(time.Duration(scaled(t, 3)) * time.Second)
	// And the hub itself, in the middle of it.
	must(t, s.Kill(t.Context(), testenv.NRIHub))
	time.Sleep(time.Second)
	must(t, s.Run(testenv.NRIHub))
	time.Sleep(time.Duration(scaled(t, 3)) * time.Second)
	close(stop)
	load.Wait()
	dying.Wait()
	if made.Load() == 0 {
		t.Fatal("no pod was made")
	}
	eventually(t, patience, "books are balanced", func() error { return steady.balance(int(2 * made.Load())) })
	if steady.synchronized() < 2 {
		t.Error("the plugin was not synchronised by the new hub")
	}
	eventually(t, patience, "nothing accumulates", func() error {
		if now := descriptors(t, s.Pid(testenv.NRIHub)); now > before+5 {
			return fmt.Errorf("%d descriptors, %d at the beginning", now, before)
		}
		return nil
	})
}

// mortal dies when it is asked for the first time.
type mortal struct {
	moment string
	die    func()
}

func (m *mortal) at(moment string) {
	if m.moment == moment {
		m.die()
	}
}

func (m *mortal) Synchronize(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
	m.at("Synchronize")
	return nil, nil
}

func (m *mortal) RunPodSandbox(context.Context, *nri.PodSandbox) error {
	m.at("RunPodSandbox")
	return nil
}

func (m *mortal) CreateContainer(context.Context, *nri.PodSandbox, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	m.at("CreateContainer")
	return nil, nil, nil
}

// SF-39: while the hub is away the rule for required plugins holds at once, also where the
// others go on without a hub.
func TestRequiredPluginsHoldWithoutTheHub(t *testing.T) {
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		switch p {
		case testenv.Gateway:
			settings.Set("nri.hold", "300ms")
		case testenv.NRIHub:
			settings.Set("required.wait", "1s")
			settings.Set("required.rules", []map[string]any{{"plugins": []string{"guard"}, "pods": map[string]any{"labels": map[string]string{"guarded": "*"}}}})
		default:
		}
	}})
	guarded := func(name string) *criv1.PodSandboxConfig {
		config := s.podConfig(name)
		config.Labels["guarded"] = "yes"
		return config
	}
	if _, err := s.try(guarded("no-plugin"), "", 20*time.Second); !oneOf(err, codes.FailedPrecondition) || !strings.Contains(err.Error(), "guard") {
		t.Errorf("without the plugin: %v", err)
	}
	s.pod(s.podConfig("plain"), "")
	s.connect(newBookkeeper(), "10", "guard")
	s.pod(guarded("with-plugin"), "")
	must(t, s.Kill(t.Context(), testenv.NRIHub))
	begin := time.Now()
	if _, err := s.try(guarded("no-hub"), "", 20*time.Second); !oneOf(err, codes.Unavailable) {
		t.Errorf("without the hub: %v", err)
	}
	s.pod(s.podConfig("plain-no-hub"), "")
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("it took %v to decide", took)
	}
	must(t, s.Run(testenv.NRIHub))
	eventually(t, patience, "guarded pods are made again", func() error {
		_, err := s.try(guarded("again"), "", 20*time.Second)
		return err
	})
}

// SF-37: what is broken or too large hurts its sender only, and nothing follows a length
// that is merely announced.
func TestBrokenAndOversizedPlugins(t *testing.T) {
	s := start(t, testenv.Setup{})
	good := newBookkeeper()
	s.connect(good, "10", "good")
	frame := func(id, length uint32, payload []byte) []byte {
		b := binary.BigEndian.AppendUint32(nil, id)
		return append(binary.BigEndian.AppendUint32(b, length), payload...)
	}
	var open []net.Conn
	for name, garbage := range map[string][]byte{
		"random bytes":           []byte("\xde\xad\xbe\xef this is no NRI at all, whatever it may look like"),
		"a huge length":          frame(2, 0xffffffff, []byte("x")),
		"a gigabyte announced":   frame(2, 1<<30, nil),
		"half a frame":           frame(2, 100, []byte("only this"))[:20],
		"an empty frame":         frame(2, 0, nil),
		"the largest, announced": frame(2, 4<<20, []byte("and no more")),
	} {
		c, err := net.Dial("unix", s.NRISocket())
		must(t, err)
		if _, err := c.Write(garbage); err != nil {
			t.Logf("%s: %v", name, err)
		}
		open = append(open, c)
	}
	huge := &bookkeeper{booked: map[string]string{}, stops: map[string]int{}, gone: map[string]int{}}
	huge.create = func(*nri.PodSandbox, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		a := &nri.ContainerAdjustment{}
		a.AddAnnotation("huge", strings.Repeat("x", 5<<20))
		return a, nil, nil
	}
	s.connect(huge, "20", "huge")
	config := s.podConfig("sizes")
	pod := s.pod(config, "")
	s.container(pod, config, script("beside-the-huge-answer", "sleep 1000"))

	// A container whose description is larger than a message of NRI.
	large := script("large", "sleep 1000")
	for i := range 50 {
		large.Envs = append(large.Envs, &criv1.KeyValue{Key: fmt.Sprintf("V%d", i), Value: []byte(strings.Repeat("v", 100<<10))})
	}
	begin := time.Now()
	_, err := s.create(pod, config, large)
	if err != nil && !oneOf(err, codes.ResourceExhausted, codes.InvalidArgument, codes.FailedPrecondition, codes.Aborted) {
		t.Errorf("large container: %v", err)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("large container took %v", took)
	}
	s.container(pod, config, script("others-are-not-affected", "sleep 1000"))
	if rss := residentBytes(t, s.Pid(testenv.NRIHub)); rss > 600<<20 {
		t.Errorf("the hub holds %d MiB", rss>>20)
	}
	for _, c := range open {
		_ = c.Close()
	}
	must(t, s.removePod(pod))
	eventually(t, patience, "the good plugin misses nothing", func() error {
		good.mu.Lock()
		defer good.mu.Unlock()
		if len(good.booked) > 0 {
			return fmt.Errorf("still booked: %v", good.booked)
		}
		return nil
	})
}

func residentBytes(t *testing.T, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	must(t, err)
	var size, resident int64
	_, err = fmt.Sscan(string(text), &size, &resident)
	must(t, err)
	return resident * int64(os.Getpagesize())
}

// SF-40: a plugin that updates all containers without a pause, also from inside of its
// handlers, stops nobody.
func TestUpdateStormByAPlugin(t *testing.T) {
	s := start(t, testenv.Setup{})
	b := newBookkeeper()
	update := func(id string, shares uint64) *nri.ContainerUpdate {
		u := &nri.ContainerUpdate{ContainerId: id}
		u.SetLinuxCPUShares(shares)
		return u
	}
	var inside atomic.Int32
	var wrong atomic.Value
	b.create = func(_ *nri.PodSandbox, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		b.mu.Lock()
		live := b.live
		others := slices.Collect(maps.Keys(b.booked))
		b.mu.Unlock()
		if live == nil {
			return nil, nil, nil
		}
		var all []*nri.ContainerUpdate
		for _, id := range append(others, c.GetId(), "unknown") {
			all = append(all, update(id, 300))
		}
		begin := time.Now()
		failed, err := live.UpdateContainers(all)
		if err != nil || time.Since(begin) > 2*time.Second {
			wrong.Store(fmt.Sprintf("update from inside of a handler: %v after %v", err, time.Since(begin)))
		}
		if !slices.ContainsFunc(failed, func(u *nri.ContainerUpdate) bool { return u.GetContainerId() == "unknown" }) {
			wrong.Store("an unknown container is not among the failed updates")
		}
		inside.Add(1)
		return nil, nil, nil
	}
	s.connect(b, "10", "storm")
	config := s.podConfig("storm")
	pod := s.pod(config, "")
	var ids []string
	for i := range 3 {
		ids = append(ids, s.container(pod, config, script(fmt.Sprintf("c%d", i), "sleep 1000")))
	}
	stop := make(chan struct{})
	var storm sync.WaitGroup
	var rounds atomic.Int32
	storm.Go(func() {
		for n := uint64(0); ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
			b.mu.Lock()
			live := b.live
			b.mu.Unlock()
			var all []*nri.ContainerUpdate
			for _, id := range ids {
				all = append(all, update(id, 200+n%10))
			}
			if _, err := live.UpdateContainers(all); err == nil {
				rounds.Add(1)
			}
		}
	})
	slowest := time.Duration(0)
	timed := func(what string, call func() error) {
		begin := time.Now()
		if err := call(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		slowest = max(slowest, time.Since(begin))
	}
	for n := range scaled(t, 4) {
		name := fmt.Sprintf("busy%d", n)
		busy := s.podConfig(name)
		var p, c string
		timed("pod", func() (err error) { p, err = s.try(busy, "", 30*time.Second); return err })
		timed("create", func() (err error) { c, err = s.create(p, busy, script("c", "sleep 1000")); return err })
		timed("start", func() error { return s.startContainer(c) })
		timed("update", func() error {
			_, err := s.CRI.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
				ContainerId: c, Linux: &criv1.LinuxContainerResources{CpuShares: 400},
			})
			return err
		})
		timed("stop", func() error { return s.stopContainer(c, 0) })
		timed("remove", func() error { return s.removePod(p) })
	}
	b.mu.Lock()
	live := b.live
	b.mu.Unlock()
	many := make([]*nri.ContainerUpdate, 10_000)
	for i := range many {
		many[i] = update(fmt.Sprintf("nobody%d", i), 100)
	}
	failed, err := live.UpdateContainers(many)
	if err == nil && len(failed) != len(many) {
		t.Errorf("%d of %d updates of unknown containers failed", len(failed), len(many))
	}
	refused := update(ids[0], 5)
	refused.SetLinuxCPUSetCPUs("999")
	if failed, err := live.UpdateContainers([]*nri.ContainerUpdate{refused, update(ids[1], 555)}); err != nil || len(failed) != 1 || failed[0].GetContainerId() != ids[0] {
		t.Errorf("a value that the kernel refuses: %v, %v", failed, err)
	}
	close(stop)
	storm.Wait()
	if slowest > 15*time.Second {
		t.Errorf("a call took %v", slowest)
	}
	if rounds.Load() == 0 || inside.Load() == 0 {
		t.Errorf("%d rounds, %d updates from inside", rounds.Load(), inside.Load())
	}
	if text, _ := wrong.Load().(string); text != "" {
		t.Error(text)
	}
	if _, err := live.UpdateContainers([]*nri.ContainerUpdate{update(ids[2], 777)}); err != nil {
		t.Error(err)
	}
	if got := s.status(ids[2]).GetResources().GetLinux().GetCpuShares(); got != 777 {
		t.Errorf("status says %d shares, want the last update's 777", got)
	}
}
