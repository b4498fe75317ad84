//go:build integration

package e2e

import (
	"maps"
	"net"
	"path/filepath"
	"strings"
	"testing"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// serveSnapshotter serves containerd's overlay snapshotter at a socket until stop is called.
func serveSnapshotter(t *testing.T, root, socket string) (stop func()) {
	t.Helper()
	snapshotter, err := overlay.NewSnapshotter(root)
	must(t, err)
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "unix", socket)
	must(t, err)
	server, done := grpc.NewServer(), make(chan error, 1)
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshotter))
	go func() { done <- server.Serve(listener) }()
	return func() {
		server.Stop()
		must(t, <-done)
		must(t, snapshotter.Close())
	}
}

// A runtime handler whose snapshotter is a process of its own.
func TestProxySnapshotter(t *testing.T) {
	dir := t.TempDir()
	root, socket := filepath.Join(dir, "root"), filepath.Join(dir, "s.sock")
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		if p != testenv.Sandboxd {
			return
		}
		settings.Set("image.proxy_snapshotters.stars", map[string]any{"address": socket, "root": dir})
		handler := maps.Clone(settings.Get("runtime.handlers.crisp").(map[string]any))
		handler["snapshotter"] = "stars"
		settings.Set("runtime.handlers.lazy", handler)
	}})
	s.pull(busybox)
	run := func(name, handler string) error {
		config := s.podConfig(name)
		answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
		must(t, err)
		created, err := s.CRI.CreateContainer(t.Context(), &criv1.CreateContainerRequest{
			PodSandboxId: answer.GetPodSandboxId(), SandboxConfig: config, Config: containerConfig("main", "echo more > /file && test -s /file"),
		})
		if err != nil {
			return err
		}
		_, err = s.CRI.StartContainer(t.Context(), &criv1.StartContainerRequest{ContainerId: created.GetContainerId()})
		must(t, err)
		if code := s.waitExit(created.GetContainerId()).GetExitCode(); code != 0 {
			t.Errorf("%s: exit code %d", name, code)
		}
		return nil
	}

	if err := run("early", "lazy"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), socket) {
		t.Errorf("container without its snapshotter: %v", err)
	}
	must(t, run("other", ""))
	stop := serveSnapshotter(t, root, socket)
	eventually(t, "the snapshotter is found", func() error { return run("first", "lazy") })
	layers, err := filepath.Glob(filepath.Join(root, "snapshots", "*"))
	must(t, err)
	if len(layers) == 0 {
		t.Error("the snapshotter has no layers")
	}
	_, err = s.Images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: busybox, RuntimeHandler: "lazy"}})
	must(t, err)
	stop()
	must(t, run("another", ""))
	stop = serveSnapshotter(t, root, socket)
	eventually(t, "the snapshotter is found again", func() error { return run("second", "lazy") })
	must(t, s.RemoveAll(t.Context()))
	stop()
}
