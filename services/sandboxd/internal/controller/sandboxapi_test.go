package controller_test

import (
	"bytes"
	"context"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimespec "github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/controller"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

func fakeNode(t *testing.T, dir string) (*shim.Manager, *controller.Router) {
	t.Helper()
	return loggingNode(t, dir, slog.DiscardHandler)
}

func loggingNode(t *testing.T, dir string, log slog.Handler) (*shim.Manager, *controller.Router) {
	t.Helper()
	m, err := shim.New(t.Context(), shim.Config{
		Dir: filepath.Join(dir, "shims"), EventsSocket: filepath.Join(dir, "events.sock"),
		Timeouts: shim.Timeouts{Start: testkit.Patience, Connect: testkit.Patience, Load: testkit.Patience, Cleanup: testkit.Patience},
	}, slog.New(log))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, controller.New(m, controller.NewTasks(m))
}

func TestSandboxAPI(t *testing.T) {
	dir := shimtest.Dir(t)
	var log bytes.Buffer
	m, ctl := loggingNode(t, dir, slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	ctx := t.Context()
	id := shimtest.ID()
	spec := port.SandboxSpec{
		ID:         id,
		Handler:    shimtest.Fake(t, dir, "sandbox", pod.SandboxerShim),
		Config:     &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: "p"}},
		Namespaces: map[string]string{"network": "/run/netns/x"},
	}
	if err := ctl.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	if err := ctl.Create(ctx, spec); !errdefs.IsAlreadyExists(err) {
		t.Errorf("second create: %v", err)
	}
	if i, err := ctl.Start(ctx, id); err != nil || i.Pid == 0 || i.CreatedAt.IsZero() {
		t.Errorf("start: %+v, %v", i, err)
	}
	if p, err := ctl.Platform(ctx, id); err != nil || p.Architecture != "riscv64" {
		t.Errorf("platform: %+v, %v", p, err)
	}
	st, err := ctl.Status(ctx, id, true)
	if err != nil || !st.Alive || st.Info["netns"] != "/run/netns/x" {
		t.Errorf("status: %+v, %v", st, err)
	}
	if a, err := ctl.Metrics(ctx, id); err != nil || a.GetTypeUrl() != "fake/metrics" {
		t.Errorf("metrics: %v, %v", a, err)
	}
	if err := ctl.Update(ctx, id, nil, nil); !errdefs.IsNotImplemented(err) {
		t.Errorf("update: %v", err)
	}
	waited := make(chan pod.Exit, 1)
	go func() {
		e, _ := ctl.Wait(context.WithoutCancel(ctx), id)
		waited <- e
	}()
	if err := ctl.Stop(ctx, id, testkit.Patience); err != nil {
		t.Error(err)
	}
	if e := <-waited; e.Code != 9 || e.At.IsZero() {
		t.Errorf("wait: %+v", e)
	}
	if st, err := ctl.Status(ctx, id, false); err != nil || st.Alive || st.ExitedAt.IsZero() {
		t.Errorf("status after stop: %+v, %v", st, err)
	}
	if err := ctl.Shutdown(ctx, id); err != nil {
		t.Error(err)
	}
	if _, err := m.Get(id); !errdefs.IsNotFound(err) {
		t.Errorf("after shutdown: %v", err)
	}
	shimtest.NothingLeft(t, dir)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	// Nobody is told of an end that was asked for.
	if text := strings.ReplaceAll(log.String(), "fake shim serves", ""); strings.Contains(text, "connection") || strings.Contains(text, "dead") {
		t.Errorf("log:\n%s", text)
	}
}

func TestSandboxAPIRefusesAndDies(t *testing.T) {
	dir := shimtest.Dir(t)
	m, ctl := fakeNode(t, dir)
	ctx := t.Context()
	spec := port.SandboxSpec{
		ID:      shimtest.ID(),
		Handler: shimtest.Fake(t, dir, "sandbox", pod.SandboxerShim),
		Config:  &criv1.PodSandboxConfig{Annotations: map[string]string{"fake/refuse": "1"}},
	}
	if err := ctl.Create(ctx, spec); !errdefs.IsInvalidArgument(err) {
		t.Errorf("refused create: %v", err)
	}
	if _, err := m.Get(spec.ID); !errdefs.IsNotFound(err) {
		t.Errorf("after refusal: %v", err)
	}
	spec.Config = nil
	if err := ctl.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	st, err := ctl.Status(ctx, spec.ID, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(int(st.ShimPid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e, err := ctl.Wait(ctx, spec.ID); err != nil || e.Code != pod.ExitCodeUnknown || e.At.IsZero() {
		t.Errorf("wait: %+v, %v", e, err)
	}
	if err := ctl.Stop(ctx, spec.ID, time.Second); err != nil {
		t.Errorf("stop of the dead: %v", err)
	}
	if st, err := ctl.Status(ctx, spec.ID, true); err != nil || st.Alive || st.ExitedAt.IsZero() {
		t.Errorf("status of the dead: %+v, %v", st, err)
	}
	if err := ctl.Shutdown(ctx, spec.ID); err != nil {
		t.Error(err)
	}
}

func TestUnknownSandbox(t *testing.T) {
	_, ctl := fakeNode(t, shimtest.Dir(t))
	ctx := t.Context()
	id := shimtest.ID()
	if err := ctl.Stop(ctx, id, 0); !errdefs.IsNotFound(err) {
		t.Errorf("stop: %v", err)
	}
	if _, err := ctl.Status(ctx, id, false); !errdefs.IsNotFound(err) {
		t.Errorf("status: %v", err)
	}
	if _, err := ctl.Wait(ctx, id); !errdefs.IsNotFound(err) {
		t.Errorf("wait: %v", err)
	}
	for _, any := range []string{id, "", "../x", "a/b", "nul\x00"} {
		if err := ctl.Shutdown(ctx, any); err != nil {
			t.Errorf("shutdown of %q: %v", any, err)
		}
		err := ctl.Create(ctx, port.SandboxSpec{ID: any, Handler: pod.Handler{Sandboxer: "other"}})
		if !errdefs.IsInvalidArgument(err) {
			t.Errorf("create of %q: %v", any, err)
		}
	}
}

// A pod without a process of its own has the machine's platform, and nothing to measure or to
// change: the caller is told so instead of getting nothing.
func TestPodsandboxWithoutProcess(t *testing.T) {
	dir := shimtest.Dir(t)
	_, ctl := fakeNode(t, dir)
	ctx := t.Context()
	id := shimtest.ID()
	for _, known := range []bool{false, true} {
		if known {
			if err := ctl.Create(ctx, port.SandboxSpec{ID: id, Handler: shimtest.Fake(t, dir, "proto", "")}); err != nil {
				t.Fatal(err)
			}
			if _, err := ctl.Start(ctx, id); err != nil {
				t.Fatal(err)
			}
		}
		p, err := ctl.Platform(ctx, id)
		if known && (err != nil || p.OS != runtime.GOOS || p.Architecture != runtime.GOARCH) || !known && !errdefs.IsNotFound(err) {
			t.Errorf("known %t: platform %+v, %v", known, p, err)
		}
		_, metricsErr := ctl.Metrics(ctx, id)
		updateErr := ctl.Update(ctx, id, &runtimespec.LinuxResources{}, nil)
		for what, err := range map[string]error{"metrics": metricsErr, "update": updateErr} {
			if errdefs.IsNotImplemented(err) != known || errdefs.IsNotFound(err) == known || !strings.Contains(err.Error(), id) {
				t.Errorf("known %t: %s: %v", known, what, err)
			}
		}
	}
	if err := ctl.Shutdown(ctx, id); err != nil {
		t.Error(err)
	}
}

var (
	_ port.Controller = (*controller.Router)(nil)
	_ port.Tasks      = (*controller.Tasks)(nil)
)
