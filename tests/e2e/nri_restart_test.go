//go:build integration

package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// stay keeps the plugin connected until the test ends, as a plugin that comes back by
// itself does.
func (p *plugin) stay(t *testing.T, s *system, index, name string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	first := make(chan struct{})
	ended.Go(func() {
		once := sync.OnceFunc(func() { close(first) })
		for ctx.Err() == nil {
			st, err := stub.New(p, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx(index), stub.WithPluginName(name), stub.WithOnClose(func() {}))
			if err == nil {
				err = st.Start(ctx)
			}
			if err != nil {
				time.Sleep(20 * time.Millisecond)
				continue
			}
			once()
			stop := context.AfterFunc(ctx, st.Stop)
			st.Wait()
			stop()
			st.Stop()
		}
	})
	t.Cleanup(func() {
		cancel()
		ended.Wait()
	})
	<-first
}

// The hub dies again and again while pods are made: none fails, none slips past the plugin,
// and each new hub tells the plugin again what is there.
func TestHubDiesUnderLoad(t *testing.T) {
	const deaths, workers, least = 3, 3, 2
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	p := &plugin{adjust: func(*nri.Container) *nri.ContainerAdjustment {
		a := &nri.ContainerAdjustment{}
		a.AddEnv("ADJUSTED", "yes")
		return a
	}}
	p.stay(t, s, "10", "guard")
	pod, config := s.pod("survivor")
	survivor := s.container(pod, config, containerConfig("survivor", "sleep 1000"))

	var (
		load sync.WaitGroup
		mu   sync.Mutex
		made []string
	)
	over := make(chan struct{})
	for w := range workers {
		load.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-over:
					if i >= least {
						return
					}
				default:
				}
				name := fmt.Sprintf("load-%d-%d", w, i)
				if err := s.makeAndRemove(name); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				mu.Lock()
				made = append(made, name)
				mu.Unlock()
			}
		})
	}
	for range deaths {
		time.Sleep(time.Second)
		must(t, s.Kill(t.Context(), testenv.NRIHub))
		time.Sleep(300 * time.Millisecond)
		must(t, s.Run(testenv.NRIHub))
		must(t, s.WaitReady(t.Context()))
	}
	time.Sleep(time.Second)
	close(over)
	load.Wait()

	calls := p.noted()
	for _, name := range made {
		if !slices.Contains(calls, "CreateContainer "+name) {
			t.Errorf("container %s was made without the plugin", name)
		}
	}
	told := 0
	for _, c := range calls {
		if c == "Synchronize container survivor" {
			told++
		}
	}
	if told != deaths {
		t.Errorf("the plugin was told of what is there %d times, want %d", told, deaths)
	}
	if got := s.exec(survivor, "sh", "-c", "echo $ADJUSTED"); got != "yes\n" {
		t.Errorf("the survivor says %q", got)
	}
	t.Logf("%d pods were made over %d deaths of the hub", len(made), deaths)
}

// makeAndRemove takes a pod with one container through its life.
func (s *system) makeAndRemove(name string) error {
	ctx := s.t.Context()
	config := s.podConfig(name)
	pod, err := s.CRI.RunPodSandbox(ctx, &criv1.RunPodSandboxRequest{Config: config})
	if err != nil {
		return err
	}
	c, err := s.CRI.CreateContainer(ctx, &criv1.CreateContainerRequest{
		PodSandboxId: pod.GetPodSandboxId(), Config: containerConfig(name, "sleep 1000"), SandboxConfig: config,
	})
	if err != nil {
		return err
	}
	if _, err := s.CRI.StartContainer(ctx, &criv1.StartContainerRequest{ContainerId: c.GetContainerId()}); err != nil {
		return err
	}
	if _, err := s.CRI.StopPodSandbox(ctx, &criv1.StopPodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()}); err != nil {
		return err
	}
	_, err = s.CRI.RemovePodSandbox(ctx, &criv1.RemovePodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()})
	return err
}

// A plugin that connects while the hub is away waits for it and is not refused, if the
// socket is held by a service manager; what is created then does not slip past it.
func TestPassedNRISocketSurvivesTheHub(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	must(t, s.Stop(t.Context(), testenv.NRIHub))
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.NRISocket(), Net: "unix"})
	must(t, err)
	defer func() { _ = listener.Close() }()
	socket, err := listener.File()
	must(t, err)
	defer func() { _ = socket.Close() }()
	s.Pass(testenv.NRIHub, filepath.Base(s.NRISocket()), socket)
	must(t, s.Run(testenv.NRIHub))
	must(t, s.WaitReady(t.Context()))
	must(t, s.Kill(t.Context(), testenv.NRIHub))

	p := &plugin{}
	st, err := stub.New(p, stub.WithSocketPath(s.NRISocket()), stub.WithPluginIdx("10"), stub.WithPluginName("early"), stub.WithOnClose(func() {}))
	must(t, err)
	registered := make(chan error, 1)
	go func() { registered <- st.Start(context.Background()) }()
	defer st.Stop()
	select {
	case err := <-registered:
		t.Fatalf("registered without a hub: %v", err)
	case <-time.After(time.Second):
	}
	must(t, s.Run(testenv.NRIHub))
	select {
	case err := <-registered:
		must(t, err)
	case <-time.After(time.Minute):
		t.Fatal("the plugin that waited was not registered")
	}
	eventually(t, "the plugin gets events", func() error {
		name := fmt.Sprintf("pod-%d", len(p.noted()))
		pod, _ := s.pod(name)
		if !slices.Contains(p.noted(), "RunPodSandbox "+name) {
			return fmt.Errorf("calls are %q", p.noted())
		}
		s.crictl("stopp", pod)
		return nil
	})
	if _, err := os.Stat(s.NRISocket()); err != nil {
		t.Errorf("the socket of the service manager is gone: %v", err)
	}
}
