package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/leak"
)

// nobody is the user id of the processes that need no privilege.
const nobody = 65534

// Setup describes a system. The zero value is the four processes with their
// default configuration, an empty registry and a bridge network.
type Setup struct {
	// Images are served by a registry that stands in for all registries.
	Images []fixture.Image
	// Handler is the runtime handler of pods that name none; empty: what CRISP_TEST_HANDLER
	// says, else the default of the program.
	Handler string
	// Privileged runs all four processes as root. Otherwise the gateway, the hub
	// and the bus run as an ordinary user.
	Privileged bool
	// TraceEndpoint is an OTLP gRPC address that gets the spans of all processes.
	TraceEndpoint string
	// Configure, if set, changes a process's settings before it is started.
	Configure func(Process, Settings)
	// AllCgroups makes every new cgroup count as left behind, not only those below
	// CgroupParent. It is for callers that make pods elsewhere, on a machine where
	// nothing else runs containers meanwhile.
	AllCgroups bool
	// KeepFolder leaves the system's folder on the disk.
	KeepFolder bool
}

// System is a running system.
type System struct {
	CRI      criv1.RuntimeServiceClient
	Images   criv1.ImageServiceClient
	Registry *fixture.Registry

	setup    Setup
	layout   layout
	conn     *grpc.ClientConn
	programs map[Process]*program
	before   leak.Snapshot
}

// Start launches a system for one test, and at its end stops it and fails the
// test if anything is left behind. It skips the test without root.
func Start(tb testing.TB, setup Setup) *System {
	tb.Helper()
	if os.Getuid() != 0 {
		tb.Skip("needs root")
	}
	if os.Getenv(insideVariable) == "" {
		tb.Fatal("the package's TestMain must call testenv.Main")
	}
	s, err := Launch(tb.Context(), setup)
	if err != nil {
		tb.Fatalf("start the system: %v", err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), 2*time.Minute)
		defer cancel()
		leaked, err := s.Close(ctx)
		if err != nil {
			tb.Errorf("stop the system: %v", err)
		}
		if len(leaked) > 0 {
			tb.Error(leak.Report(leaked))
		}
		if tb.Failed() {
			s.WriteLogs(tb.Output())
		}
		if err := s.RemoveFolder(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// Launch starts a system and waits until it is ready. The caller must be inside
// namespaces (Isolate) and must Close what it gets.
func Launch(ctx context.Context, setup Setup) (*System, error) {
	root, err := os.MkdirTemp("", "crisp-")
	if err != nil {
		return nil, err
	}
	s := &System{setup: setup, layout: layout{root}, programs: map[Process]*program{}}
	if err := s.launch(ctx); err != nil {
		var text strings.Builder
		s.WriteLogs(&text)
		_, closeErr := s.Close(context.WithoutCancel(ctx))
		return nil, errors.Join(err, closeErr, s.RemoveFolder(), errors.New(text.String()))
	}
	return s, nil
}

func (s *System) launch(ctx context.Context) error {
	if err := s.prepare(ctx); err != nil {
		return err
	}
	before, err := leak.Take(ctx, s.leakScope())
	if err != nil {
		return err
	}
	s.before = before
	for _, p := range startOrder() {
		if err := s.programs[p].start(); err != nil {
			return err
		}
	}
	// Delays and sizes are as kubelet has them.
	again := grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: 5 * time.Second}
	again.Backoff.BaseDelay, again.Backoff.MaxDelay = 100*time.Millisecond, 3*time.Second
	s.conn, err = grpc.NewClient("unix://"+s.Socket(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(again), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	if err != nil {
		return err
	}
	s.CRI = criv1.NewRuntimeServiceClient(s.conn)
	s.Images = criv1.NewImageServiceClient(s.conn)
	return s.WaitReady(ctx)
}

// prepare makes folders, network, registry, configuration and programs.
func (s *System) prepare(ctx context.Context) error {
	// Several of these folders are used by processes of an ordinary user.
	for _, dir := range []string{"", "run", "lib", "nri", "etc", "logs", "home"} {
		if err := os.MkdirAll(s.layout.path(dir), 0o755); err != nil {
			return err
		}
		// MkdirTemp and the umask may have left less.
		if err := os.Chmod(s.layout.path(dir), 0o777); err != nil {
			return err
		}
	}
	for _, dir := range []string{"net.d", "cni", "addresses", "hosts", "nri/plugins", "nri/conf.d"} {
		if err := os.MkdirAll(s.layout.path(dir), 0o755); err != nil {
			return err
		}
	}
	plugins, err := CNIFolder()
	if err != nil {
		return err
	}
	if err := s.layout.writeNetwork(plugins); err != nil {
		return err
	}
	s.Registry, err = fixture.Serve(ctx, fixture.Config{}, s.setup.Images)
	if err != nil {
		return err
	}
	if err := fixture.WriteHosts(s.layout.path("hosts"), s.Registry.Addr()); err != nil {
		return err
	}
	for _, p := range startOrder() {
		if err := s.define(ctx, p, plugins); err != nil {
			return err
		}
	}
	return nil
}

// define makes one program with its configuration file.
func (s *System) define(ctx context.Context, p Process, plugins string) error {
	path, err := Binary(string(p))
	if err != nil {
		return err
	}
	settings, err := defaults(ctx, path)
	if err != nil {
		return err
	}
	s.layout.relocate(map[string]any(settings))
	if err := s.adapt(p, settings, plugins); err != nil {
		return err
	}
	if s.setup.Configure != nil {
		s.setup.Configure(p, settings)
	}
	file := s.layout.path("etc", string(p)+".toml")
	if err := writeConfig(file, settings); err != nil {
		return err
	}
	program := &program{name: p, path: path, args: []string{"run", "--config", file}, folder: s.layout.path("logs"), env: s.environment(p)}
	if p != Sandboxd && !s.setup.Privileged {
		program.uid = nobody
	}
	s.programs[p] = program
	return nil
}

func (s *System) environment(Process) []string {
	bin, err := binFolder()
	if err != nil {
		bin = ""
	}
	env := []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + s.layout.path("home"), "GOTRACEBACK=all"}
	if s.setup.TraceEndpoint != "" {
		env = append(env, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+s.setup.TraceEndpoint, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc",
			"OTEL_EXPORTER_OTLP_INSECURE=true", "OTEL_BSP_SCHEDULE_DELAY=200", "OTEL_TRACES_EXPORTER=otlp")
	}
	return env
}

// Socket is the path of the CRI socket.
func (s *System) Socket() string { return s.layout.path("run", "cri.sock") }

// NRISocket is the path of the socket that NRI plugins connect to.
func (s *System) NRISocket() string { return s.layout.path("nri", "nri.sock") }

// Path is a path below the system's folder.
func (s *System) Path(parts ...string) string { return s.layout.path(parts...) }

// Pid is the process id of a running process, or 0.
func (s *System) Pid(p Process) int { return s.programs[p].pid() }

// CgroupParent is a parent for the cgroups of the system's pods, which goes with
// the system. Cgroups elsewhere are not watched, unless the Setup says so.
func (s *System) CgroupParent() string {
	return filepath.Join("/", os.Getenv(delegatedVariable), filepath.Base(s.layout.root))
}

// ConfigFile is the path of a process's configuration.
func (s *System) ConfigFile(p Process) string { return s.layout.path("etc", string(p)+".toml") }

// Kill ends a process with SIGKILL and waits until it is gone.
func (s *System) Kill(ctx context.Context, p Process) error {
	return s.programs[p].signal(ctx, syscall.SIGKILL)
}

// Stop ends a process in good order.
func (s *System) Stop(ctx context.Context, p Process) error { return s.programs[p].stop(ctx) }

// Run starts a process that was killed or stopped.
func (s *System) Run(p Process) error { return s.programs[p].start() }

// Pass hands a socket of that name to all later lives of a process, as a service manager does.
func (s *System) Pass(p Process, name string, socket *os.File) {
	program := s.programs[p]
	program.mu.Lock()
	defer program.mu.Unlock()
	program.passed, program.passedNames = append(program.passed, socket), append(program.passedNames, name)
}

// Restart kills a process, starts it again and waits until the system is ready.
func (s *System) Restart(ctx context.Context, p Process) error {
	if err := s.Kill(ctx, p); err != nil {
		return err
	}
	if err := s.Run(p); err != nil {
		return err
	}
	return s.WaitReady(ctx)
}

// WaitReady waits until the CRI status says that runtime and network are ready,
// at most a minute.
func (s *System) WaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	last := errors.New("no answer yet")
	for {
		for p, program := range s.programs {
			if program.pid() == 0 {
				return fmt.Errorf("%s: %w", p, errNotRunning)
			}
		}
		last = s.ready(ctx, last)
		if last == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the system is not ready: %w", last)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// ready says what the system lacks, or, when the time ended the call itself,
// what it lacked before.
func (s *System) ready(ctx context.Context, before error) error {
	limited, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	answer, err := s.CRI.Status(limited, &criv1.StatusRequest{})
	if err != nil {
		if ctx.Err() != nil {
			return before
		}
		return err
	}
	met := 0
	for _, c := range answer.GetStatus().GetConditions() {
		if c.GetType() != "RuntimeReady" && c.GetType() != "NetworkReady" {
			continue
		}
		if !c.GetStatus() {
			return fmt.Errorf("%s is false: %s: %s", c.GetType(), c.GetReason(), c.GetMessage())
		}
		met++
	}
	if met != 2 {
		return fmt.Errorf("status lacks a condition: %v", answer.GetStatus().GetConditions())
	}
	return nil
}

// Close removes all pods, stops the processes, the last started first, and
// gives what was left behind. The folder with the logs stays.
func (s *System) Close(ctx context.Context) ([]string, error) {
	var problems []error
	if s.CRI != nil && s.Pid(Gateway) != 0 {
		problems = append(problems, s.RemoveAll(ctx))
	}
	for _, p := range slices.Backward(startOrder()) {
		if program := s.programs[p]; program != nil && program.pid() != 0 {
			problems = append(problems, program.stop(ctx))
		}
	}
	if s.conn != nil {
		problems = append(problems, s.conn.Close())
	}
	var leaked []string
	if s.before != nil {
		var err error
		leaked, err = leak.Settle(ctx, s.before, s.leakScope(), time.Minute)
		problems = append(problems, err, s.sweep())
	}
	if s.Registry != nil {
		problems = append(problems, s.Registry.Close())
	}
	return leaked, errors.Join(problems...)
}

// RemoveAll removes all pods over the CRI socket.
func (s *System) RemoveAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	pods, err := s.CRI.ListPodSandbox(ctx, &criv1.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	var problems []error
	for _, pod := range pods.GetItems() {
		_, err := s.CRI.StopPodSandbox(ctx, &criv1.StopPodSandboxRequest{PodSandboxId: pod.GetId()})
		problems = append(problems, err)
		_, err = s.CRI.RemovePodSandbox(ctx, &criv1.RemovePodSandboxRequest{PodSandboxId: pod.GetId()})
		problems = append(problems, err)
	}
	return errors.Join(problems...)
}

// WriteLogs writes the processes' logs, the end of each if it is long.
func (s *System) WriteLogs(out io.Writer) {
	const most = 64 << 10
	for _, p := range startOrder() {
		program := s.programs[p]
		if program == nil {
			continue
		}
		text, err := os.ReadFile(program.logPath())
		if err != nil {
			continue
		}
		if len(text) > most {
			text = text[len(text)-most:]
		}
		fmt.Fprintf(out, "--- %s ---\n%s\n", filepath.Base(program.logPath()), text)
	}
}

// RemoveFolder deletes the logs and all other files of a closed system.
func (s *System) RemoveFolder() error {
	if s.setup.KeepFolder {
		return nil
	}
	return os.RemoveAll(s.layout.root)
}
