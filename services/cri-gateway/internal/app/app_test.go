package app

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/backendtest"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/config"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// serve runs a stand-in on a socket until the end of the test.
func serve(t *testing.T, socket string, regs []rpc.Registration) {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	srv, err := rpc.NewServer(rpc.DefaultServerConfig(socket), tel, regs...)
	if err != nil {
		t.Fatal(err)
	}
	inBackground(t, func(ctx context.Context) error {
		return srv.Part("stand-in").Run(ctx, func() {})
	})
}

// inBackground runs f until the end of the test and reports its error.
func inBackground(t *testing.T, f func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// start runs a gateway in dir and returns a connection to it.
func start(t *testing.T, dir string) *grpc.ClientConn {
	t.Helper()
	cfg := config.Default()
	cfg.CRI.Socket.Path = filepath.Join(dir, "cri.sock")
	cfg.Sandboxd.Socket = filepath.Join(dir, "sandboxd.sock")
	cfg.NRI.Socket = filepath.Join(dir, "hub.sock")
	cfg.Events.URL = ""
	cfg.Admin.Listen = ""
	tel, _ := testkit.Telemetry(t)
	a, err := New(cfg, tel)
	if err != nil {
		t.Fatal(err)
	}
	inBackground(t, func(ctx context.Context) error { return lifecycle.Run(ctx, tel.Log, a.Parts()...) })
	conn, err := grpc.NewClient("unix:"+cfg.CRI.Socket.Path,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func TestGatewayAlone(t *testing.T) {
	cri := criv1.NewRuntimeServiceClient(start(t, t.TempDir()))
	version, err := cri.Version(t.Context(), &criv1.VersionRequest{})
	if err != nil || version.GetRuntimeVersion() == "" {
		t.Errorf("Version = %v, %v; want an answer without sandboxd", version, err)
	}
	status, err := cri.Status(t.Context(), &criv1.StatusRequest{})
	if err != nil || status.GetStatus().GetConditions()[0].GetStatus() {
		t.Errorf("Status = %v, %v; want not ready", status, err)
	}
}

func TestGatewayWithBackends(t *testing.T) {
	dir := t.TempDir()
	journal := &backendtest.Journal{}
	sandboxd := backendtest.NewSandboxd(journal)
	hub := backendtest.NewHub(journal, &nriv1.HubState{Generation: 1, SubscribedEvents: backendtest.AllEvents(), Ready: true})
	cri := criv1.NewRuntimeServiceClient(start(t, dir))
	// The gateway is there before its backends; the first call waits for both.
	serve(t, filepath.Join(dir, "hub.sock"), hub.Registrations())
	serve(t, filepath.Join(dir, "sandboxd.sock"), sandboxd.Registrations())

	run, err := cri.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: &criv1.PodSandboxConfig{
		Metadata: &criv1.PodSandboxMetadata{Name: "a", Namespace: "b", Uid: "c"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if calls := strings.Join(journal.Take(), " "); calls != "PrepareSandbox hub.RunPodSandbox CommitSandbox" {
		t.Errorf("calls %s", calls)
	}
	container := backendtest.ID("c")
	sandboxd.AddContainer(run.GetPodSandboxId(), container)
	exec, err := cri.Exec(t.Context(), &criv1.ExecRequest{ContainerId: container, Cmd: []string{"a"}, Stdout: true})
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, exec.GetUrl(), nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest {
		t.Errorf("GET %s: %d, want 400 for a request without an upgrade", exec.GetUrl(), resp.StatusCode)
	}
	sandboxd.HangUp()
	testkit.Eventually(t, testkit.Patience, func() error {
		if len(sandboxd.Sessions()) < 2 {
			return errors.New("session not opened again")
		}
		return nil
	})
}
