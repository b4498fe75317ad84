//go:build bench

package adaptationtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	theirs "github.com/containerd/nri/pkg/adaptation"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/sirupsen/logrus" //nolint:depguard // NRI's library logs with it; the bench silences it

	"github.com/crisp-cri/crisp/services/internal/reload"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/app"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// This program is also the hub and the plugins that it measures: each of them is a process
// of its own, as it is on a node.
const (
	roleHub     = "CRISP_BENCH_HUB"     // folder of the hub
	rolePlugins = "CRISP_BENCH_PLUGINS" // socket to register at
	envCount    = "CRISP_BENCH_COUNT"   // number of plugins
	envDelay    = "CRISP_BENCH_DELAY"   // what a plugin takes for a CreateContainer
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(roleHub) != "":
		os.Exit(exitCode(hubProcess(os.Getenv(roleHub))))
	case os.Getenv(rolePlugins) != "":
		os.Exit(exitCode(pluginProcess(os.Getenv(rolePlugins))))
	}
	logrus.SetOutput(io.Discard)
	code := m.Run()
	fmt.Println(lastLine)
	os.Exit(code)
}

var lastLine = "hub_parallel_ratio=unknown hub_single_ratio=unknown"

func exitCode(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func hubConfig(folder string) config.Config {
	a := &Adaptation{cfg: config.Default(), folder: folder}
	a.configure()
	a.cfg.NRI.Socket.Path = filepath.Join(folder, "nri.sock")
	a.cfg.Launch.Enable = false
	a.cfg.Events.URL = ""
	// The plugins of the bench keep nothing between two requests, so they may have several
	// in flight: that is said of a plugin in the configuration.
	a.cfg.Plugins = []config.Plugin{{Name: "*", Parallel: 64}}
	a.cfg.Log.Level = "error"
	return a.cfg
}

func hubProcess(folder string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return app.Run(ctx, hubConfig(folder), os.Stderr, reload.Source[config.Config]{})
}

type benchPlugin struct {
	name  string
	delay time.Duration
}

func (*benchPlugin) Synchronize(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
	fmt.Println("synchronised")
	return nil, nil
}

func (p *benchPlugin) CreateContainer(_ context.Context, _ *nri.PodSandbox, _ *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	time.Sleep(p.delay)
	a := &nri.ContainerAdjustment{}
	a.AddAnnotation("bench/"+p.name, "seen")
	return a, nil, nil
}

func (*benchPlugin) PostCreateContainer(context.Context, *nri.PodSandbox, *nri.Container) error {
	return nil
}

func pluginProcess(socket string) error {
	logrus.SetOutput(io.Discard)
	count, err := strconv.Atoi(os.Getenv(envCount))
	if err != nil {
		return err
	}
	delay, err := time.ParseDuration(os.Getenv(envDelay))
	if err != nil {
		return err
	}
	for i := range count {
		s, err := stub.New(&benchPlugin{name: strconv.Itoa(i), delay: delay}, stub.WithPluginName("bench"), stub.WithPluginIdx(fmt.Sprintf("%02d", i)),
			stub.WithSocketPath(socket), stub.WithOnClose(func() {}))
		if err != nil {
			return err
		}
		if err := s.Start(context.Background()); err != nil {
			return err
		}
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the bench ends
	return nil
}

// child starts this program in another role; stop ends it.
func child(t *testing.T, env ...string) (out io.Reader, stop func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return pipe, func() {
		_ = in.Close()
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}
}

func plugins(t *testing.T, socket string, count int, delay time.Duration) (stop func()) {
	t.Helper()
	out, stop := child(t, rolePlugins+"="+socket, envCount+"="+strconv.Itoa(count), envDelay+"="+delay.String())
	lines := bufio.NewScanner(out)
	for range count {
		if !lines.Scan() {
			t.Fatal("a plugin did not come up")
		}
	}
	return stop
}

// create does what a CreateContainer needs of NRI. It returns when the container may be
// made, with what is still to be done and that the caller of CRI does not wait for.
type create func(ctx context.Context, pod *nri.PodSandbox, c *nri.Container) (afterwards func() error, err error)

func nothing(ctx context.Context, cb SyncCB) error {
	_, err := cb(ctx, nil, nil)
	return err
}

func noUpdates(context.Context, []*nri.ContainerUpdate) ([]*nri.ContainerUpdate, error) {
	return nil, nil
}

func startOurs(t *testing.T, count int, delay time.Duration) (create, func()) {
	t.Helper()
	folder, err := os.MkdirTemp("", "hub")
	if err != nil {
		t.Fatal(err)
	}
	_, stopHub := child(t, roleHub+"="+folder)
	a, err := New("bench", "v1", nothing, noUpdates)
	if err != nil {
		t.Fatal(err)
	}
	a.cfg, a.folder = hubConfig(folder), folder
	if err := a.dial(); err != nil {
		t.Fatal(err)
	}
	stopPlugins := plugins(t, a.cfg.NRI.Socket.Path, count, delay)
	a.BlockPluginSync()
	return func(ctx context.Context, pod *nri.PodSandbox, c *nri.Container) (func() error, error) {
			// Like the gateway: no call when nobody listens, and nobody waits for an event
			// that only tells what has happened.
			events := nri.EventMask(a.gateway.events.Load())
			if !events.IsSet(nri.Event_CREATE_CONTAINER) {
				return nil, nil
			}
			_, err := a.CreateContainer(ctx, &nri.CreateContainerRequest{Pod: pod, Container: c})
			return func() error {
				return a.PostCreateContainer(ctx, &nri.PostCreateContainerRequest{Pod: pod, Container: c})
			}, err
		}, func() {
			stopPlugins()
			a.Stop()
			stopHub()
		}
}

func startTheirs(t *testing.T, count int, delay time.Duration) (create, func()) {
	t.Helper()
	folder, err := os.MkdirTemp("", "nri")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(folder, "nri.sock")
	a, err := theirs.New("bench", "v1",
		func(ctx context.Context, cb theirs.SyncCB) error { return nothing(ctx, SyncCB(cb)) }, noUpdates,
		theirs.WithPluginPath(filepath.Join(folder, "plugins")), theirs.WithPluginConfigPath(filepath.Join(folder, "conf")),
		theirs.WithSocketPath(socket))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	stopPlugins := plugins(t, socket, count, delay)
	a.BlockPluginSync().Unblock()
	return func(ctx context.Context, pod *nri.PodSandbox, c *nri.Container) (func() error, error) {
			// Like containerd: both calls within CRI's.
			b := a.BlockPluginSync()
			defer b.Unblock()
			_, err := a.CreateContainer(ctx, &nri.CreateContainerRequest{Pod: pod, Container: c})
			return nil, errors.Join(err, a.PostCreateContainer(ctx, &nri.PostCreateContainerRequest{Pod: pod, Container: c}))
		}, func() {
			stopPlugins()
			a.Stop()
			_ = os.RemoveAll(folder)
		}
}

// round makes creations for a number of pods side by side and returns the median of what a
// creation took, and the time for all of them.
func round(t *testing.T, do create, pods, each int) (median, total time.Duration) {
	t.Helper()
	var (
		mu    sync.Mutex
		all   []time.Duration
		group sync.WaitGroup
	)
	begin := time.Now()
	for p := range pods {
		group.Go(func() {
			pod := &nri.PodSandbox{Id: fmt.Sprintf("pod%d", p), Name: "pod", Namespace: "default", Uid: "uid"}
			for i := range each {
				c := container(pod.GetId(), i)
				start := time.Now()
				afterwards, err := do(t.Context(), pod, c)
				took := time.Since(start)
				if afterwards != nil {
					err = errors.Join(err, afterwards())
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				all = append(all, took)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	total = time.Since(begin)
	if t.Failed() {
		t.FailNow()
	}
	return middle(all), total
}

func middle(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// container is as large as an ordinary one.
func container(pod string, i int) *nri.Container {
	c := &nri.Container{
		Id: fmt.Sprintf("%s-%d-%d", pod, i, time.Now().UnixNano()), PodSandboxId: pod, Name: "main",
		Args:   []string{"/usr/bin/server", "--listen", ":8080"},
		Labels: map[string]string{"io.kubernetes.pod.name": pod, "io.kubernetes.container.name": "main"},
		Linux: &nri.LinuxContainer{
			CgroupsPath: "/kubepods/burstable/" + pod,
			Resources:   &nri.LinuxResources{Cpu: &nri.LinuxCPU{Shares: nri.UInt64(512)}, Memory: &nri.LinuxMemory{Limit: nri.Int64(1 << 30)}},
		},
	}
	for e := range 30 {
		c.Env = append(c.Env, fmt.Sprintf("SERVICE_%d_ADDRESS=tcp://10.0.0.%d:8080", e, e))
	}
	for m := range 15 {
		c.Mounts = append(c.Mounts, &nri.Mount{
			Destination: fmt.Sprintf("/mnt/%d", m), Type: "bind", Source: fmt.Sprintf("/var/lib/kubelet/pods/%s/volumes/%d", pod, m),
			Options: []string{"rbind", "rprivate", "ro"},
		})
	}
	return c
}

// The hub's part of what NRI adds to a CreateContainer of CRI: the time that a gateway waits for
// the plugins, beside a runtime with NRI's own library in its process. Rounds of the two
// alternate, and medians count, so that what else happens on the machine hits both.
// hub_single_ratio is that of the sums over the numbers of plugins at one pod,
// hub_parallel_ratio that of the throughputs of ten pods through a slow plugin.
func TestLatency(t *testing.T) {
	fmt.Println("waited for the plugins of a CreateContainer by a gateway with a hub, and by a runtime with NRI's library; median of rounds")
	fmt.Println("plugins  pods        ours      theirs  ours/theirs")
	var oursAlone, theirsAlone time.Duration
	worst, worstAt := 0.0, 0
	for _, n := range []int{0, 1, 3, 10} {
		for _, pods := range []int{1, 50} {
			// A name for each row, so that one can be measured alone: -test.run '^TestLatency$/^3x1$'.
			t.Run(fmt.Sprintf("%dx%d", n, pods), func(t *testing.T) {
				ours, theirs := compare(t, n, pods, 0, 11, max(1, 40/pods))
				ratio := float64(ours.median) / float64(theirs.median)
				fmt.Printf("%7d %5d %11v %11v %12.2f\n", n, pods, ours.median, theirs.median, ratio)
				if pods == 1 {
					oursAlone, theirsAlone = oursAlone+ours.median, theirsAlone+theirs.median
					if ratio > worst {
						worst, worstAt = ratio, n
					}
				}
			})
		}
	}
	parallel := math.NaN()
	t.Run("parallel", func(t *testing.T) {
		ours, theirs := compare(t, 1, 10, 100*time.Millisecond, 5, 1)
		parallel = float64(theirs.total) / float64(ours.total)
		fmt.Printf("ten pods through a plugin that takes 100 ms: ours %v, theirs %v\n", ours.total, theirs.total)
	})
	fmt.Printf("highest ratio at one pod: %.2f, with %d plugins\n", worst, worstAt)
	lastLine = fmt.Sprintf("hub_parallel_ratio=%.2f hub_single_ratio=%.2f", parallel, float64(oursAlone)/float64(theirsAlone))
}

type figures struct{ median, total time.Duration }

// compare runs rounds of both in turns.
func compare(t *testing.T, count, pods int, delay time.Duration, rounds, each int) (ours, theirs figures) {
	t.Helper()
	doOurs, stopOurs := startOurs(t, count, delay)
	defer stopOurs()
	doTheirs, stopTheirs := startTheirs(t, count, delay)
	defer stopTheirs()
	var medians, totals [2][]time.Duration
	for i := range 2 * rounds {
		median, total := round(t, []create{doOurs, doTheirs}[i%2], pods, each)
		medians[i%2], totals[i%2] = append(medians[i%2], median), append(totals[i%2], total)
	}
	return figures{middle(medians[0]), middle(totals[0])}, figures{middle(medians[1]), middle(totals[1])}
}
