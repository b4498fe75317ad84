package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/protobuf/types/known/anypb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// world is a node in memory: it keeps account of what exists, like the real parts do, and
// can be told to fail. It outlives an engine, as shims and networks outlive sandboxd.
type world struct {
	mu    sync.Mutex
	holds map[string]bool  // "network s1", "shim s1", "rootfs c1", …
	fail  map[string]error // by operation name
	calls map[string]int   // by operation name
	procs map[string]*proc // by container id
	inits map[string]bool  // whether a sandbox has a process of its own
	// limits are the memory limits of sandboxes and containers, cpus the sets of processors
	// of containers.
	limits map[string]int64
	cpus   map[string]string
	// labels are those that pods were given, true while they hold them.
	labels map[string]bool
	// steps are the pauses, checkpoints and resumptions in their order.
	steps []string
	// slow makes a checkpoint last as long as its context.
	slow bool
	// layers, if set, is what the making of a writable layer waits for.
	layers chan struct{}
	// applied are the changes to root file systems, by key.
	applied map[string]string
	path    string // of the record store
}

type proc struct {
	state    string
	exit     pod.Exit
	done     chan struct{}
	signals  []syscall.Signal
	stubborn bool // ignores everything but SIGKILL
}

func newWorld(t *testing.T) *world {
	return &world{
		holds: map[string]bool{}, fail: map[string]error{}, calls: map[string]int{}, procs: map[string]*proc{}, inits: map[string]bool{}, limits: map[string]int64{}, cpus: map[string]string{}, labels: map[string]bool{}, applied: map[string]string{},
		path: filepath.Join(t.TempDir(), "records.db"),
	}
}

// do accounts for an operation and says whether it fails.
func (w *world) do(op string, change func()) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls[op]++
	if err := w.fail[op]; err != nil {
		return err
	}
	change()
	return nil
}

func (w *world) set(op string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail[op] = err
}

func (w *world) held() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for k := range w.holds {
		out = append(out, k)
	}
	return out
}

func (w *world) called(op string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.calls[op]
}

// end ends a container's process.
func (w *world) end(id string, code uint32) { w.endAt(id, code, time.Now()) }

func (w *world) endAt(id string, code uint32, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.procs[id]
	if p == nil || p.state == "stopped" {
		return
	}
	p.state = "stopped"
	p.exit = pod.Exit{Pid: 42, Code: code, At: at}
	close(p.done)
}

func (w *world) proc(id string) (*proc, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.procs[id]
	if p == nil {
		return nil, fmt.Errorf("task %q: %w", id, errdefs.ErrNotFound)
	}
	return p, nil
}

// node is a running engine over a world.
type node struct {
	*engine.Engine
	w     *world
	st    *store.Store
	close func()
}

func start(t *testing.T, w *world, bootID string) *node {
	t.Helper()
	st, err := store.Open(w.path)
	if err != nil {
		t.Fatal(err)
	}
	e := engine.New(t.Context(), engine.Config{
		Handler: pod.Handlers{ByName: map[string]pod.Handler{"runc": {Name: "runc"}, "vm": {Name: "vm", Sandboxer: pod.SandboxerShim}}, Default: "runc"}.Find, BootID: bootID,
		SessionGrace: 50 * time.Millisecond, ContainerDir: filepath.Join(filepath.Dir(w.path), "containers"),
	}, engine.Ports{
		Store: st, Images: images{}, Rootfs: rootfs{w}, ImageVolumes: imageVolumes{w}, Network: network{w}, Namespaces: namespaces{w}, Files: files{w},
		Controller: controller{w}, Tasks: tasks{w}, IO: ioPort{w}, Specs: specPort{w}, Programs: programs{w}, Cgroups: cgroups{},
	}, slog.New(slog.DiscardHandler), noop.NewTracerProvider().Tracer(""))
	err = e.Recover(t.Context(), func(context.Context) ([]string, error) { return nil, nil })
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	n := &node{Engine: e, w: w, st: st, close: func() {
		once.Do(func() {
			e.Close()
			err := st.Close()
			if err != nil {
				t.Error(err)
			}
		})
	}}
	t.Cleanup(n.close)
	return n
}

// session opens a gateway session; the returned function loses it.
func (n *node) session(t *testing.T, token string) (lose func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	hold := n.EnterSession(ctx, token)
	done := make(chan struct{})
	go func() { hold(); close(done) }()
	lose = func() { cancel(); <-done }
	t.Cleanup(lose)
	return lose
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		if !ok() {
			return errors.New("not yet: " + what)
		}
		return nil
	})
}

type images struct{}

func (images) Resolve(_ context.Context, ref string) (pod.Image, error) {
	if ref == "absent" {
		return pod.Image{}, fmt.Errorf("image %q: %w", ref, errdefs.ErrNotFound)
	}
	return pod.Image{ID: "sha256:1", Ref: ref + "@sha256:2", Name: ref, Snapshotter: "overlayfs"}, nil
}

func (images) Unpack(_ context.Context, img pod.Image, _ string) (pod.Image, error) { return img, nil }

type imageVolumes struct{ w *world }

func (v imageVolumes) Mount(_ context.Context, sandboxID, containerID string, img pod.Image, _ pod.IDMap, subPath string) (string, error) {
	return "/volumes/" + img.ID + "/" + subPath, v.w.do("volumes.mount", func() { v.w.holds["volumes "+sandboxID+" "+containerID] = true })
}

func (v imageVolumes) Release(_ context.Context, sandboxID, containerID string) error {
	return v.w.do("volumes.release", func() {
		for k := range v.w.holds {
			if k == "volumes "+sandboxID+" "+containerID || containerID == "" && strings.HasPrefix(k, "volumes "+sandboxID+" ") {
				delete(v.w.holds, k)
			}
		}
	})
}

func (v imageVolumes) Holders() (map[string][]string, error) {
	out := map[string][]string{}
	for _, h := range v.w.held() {
		var s, c string
		if n, _ := fmt.Sscanf(h, "volumes %s %s", &s, &c); n == 2 {
			out[s] = append(out[s], c)
		}
	}
	return out, nil
}

type rootfs struct{ w *world }

func (r rootfs) FillVolumes(context.Context, string, string, map[string]string) error {
	return r.w.do("rootfs.fill", func() {})
}

func (r rootfs) Diff(_ context.Context, key, _ string, out io.Writer) error {
	err := r.w.do("rootfs.diff", func() {})
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, "changes of "+key)
	return err
}

func (r rootfs) Apply(_ context.Context, key, _ string, changes io.Reader) error {
	b, err := io.ReadAll(changes)
	if err != nil {
		return err
	}
	return r.w.do("rootfs.apply", func() { r.w.applied[key] = string(b) })
}

func (r rootfs) Prepare(ctx context.Context, key string, _ pod.Image, _ pod.IDMap) ([]mount.Mount, error) {
	if r.w.layers != nil {
		select {
		case <-r.w.layers:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return nil, r.w.do("rootfs.prepare", func() { r.w.holds["rootfs "+key] = true })
}

func (r rootfs) Mounts(context.Context, string, string) ([]mount.Mount, error) {
	return nil, r.w.do("rootfs.mounts", func() {})
}

func (r rootfs) Remove(_ context.Context, key, _ string) error {
	return r.w.do("rootfs.remove", func() { delete(r.w.holds, "rootfs "+key) })
}

func (r rootfs) Accounts(context.Context, pod.Image) (pod.Accounts, error) {
	return pod.Accounts{}, r.w.do("rootfs.accounts", func() {})
}
func (rootfs) Usage(context.Context, string, string) (uint64, uint64, error) { return 0, 0, nil }
func (r rootfs) Keys(context.Context) (map[string][]string, error) {
	out := map[string][]string{}
	for _, h := range r.w.held() {
		var id string
		if n, _ := fmt.Sscanf(h, "rootfs %s", &id); n == 1 {
			out["overlayfs"] = append(out["overlayfs"], id)
		}
	}
	return out, nil
}

type network struct{ w *world }

func (n network) Attach(_ context.Context, req pod.NetworkRequest) (pod.NetworkResult, error) {
	// Like a plugin chain, an ADD that fails leaves its first half behind.
	n.w.mu.Lock()
	n.w.holds["network "+req.SandboxID] = true
	n.w.mu.Unlock()
	return pod.NetworkResult{IPs: []string{"10.0.0.2", "fd00::2"}, Raw: []byte(`{}`)}, n.w.do("network.attach", func() {})
}

func (n network) Detach(_ context.Context, req pod.NetworkRequest, _ []byte) error {
	return n.w.do("network.detach", func() { delete(n.w.holds, "network "+req.SandboxID) })
}
func (network) Ready() error                             { return nil }
func (network) SetPodCIDR(context.Context, string) error { return nil }
func (network) Dial(context.Context, string, int) (net.Conn, error) {
	return nil, errdefs.ErrNotImplemented
}

type namespaces struct{ w *world }

func (n namespaces) Pin(_ context.Context, id string, _ port.PinRequest) (map[string]string, error) {
	return map[string]string{"network": "/ns/" + id}, n.w.do("namespaces.pin", func() { n.w.holds["namespaces "+id] = true })
}

func (n namespaces) SetInterfaces(string, port.PinRequest) error {
	return n.w.do("namespaces.interfaces", func() {})
}

func (n namespaces) Unpin(_ context.Context, id string) error {
	return n.w.do("namespaces.unpin", func() { delete(n.w.holds, "namespaces "+id) })
}

type files struct{ w *world }

func (f files) Make(_ context.Context, id string, _ *criv1.PodSandboxConfig) (pod.SandboxFiles, error) {
	return pod.SandboxFiles{}, f.w.do("files.make", func() { f.w.holds["files "+id] = true })
}

func (f files) CheckLogs(*criv1.PodSandboxConfig) error {
	return f.w.do("files.logs", func() {})
}
func (files) Paths(string, *criv1.PodSandboxConfig) pod.SandboxFiles { return pod.SandboxFiles{} }
func (f files) Remove(_ context.Context, id string) error {
	return f.w.do("files.remove", func() { delete(f.w.holds, "files "+id) })
}

type controller struct{ w *world }

func (c controller) Create(_ context.Context, spec port.SandboxSpec) error {
	return c.w.do("controller.create", func() {
		c.w.holds["bundle "+spec.ID] = true
		c.w.inits[spec.ID] = spec.Init != nil
	})
}

// Start makes the cgroup of a pod's own process before anything can fail. Its removal is the
// shim's, and the shims of this world die before they come to it.
func (c controller) Start(_ context.Context, id string) (port.Instance, error) {
	_ = c.w.do("controller.init", func() {
		if c.w.inits[id] {
			c.w.holds["cgroup "+id] = true
		}
	})
	return port.Instance{CreatedAt: time.Now()}, c.w.do("controller.start", func() { c.w.holds["shim "+id] = true })
}

func (controller) Platform(context.Context, string) (ocispec.Platform, error) {
	return ocispec.Platform{}, nil
}
func (controller) Stop(context.Context, string, time.Duration) error { return nil }
func (c controller) Wait(ctx context.Context, _ string) (pod.Exit, error) {
	<-ctx.Done()
	return pod.Exit{}, ctx.Err()
}

func (c controller) Status(_ context.Context, id string, _ bool) (port.ControllerStatus, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	return port.ControllerStatus{Alive: c.w.holds["shim "+id]}, nil
}

func (c controller) Shutdown(_ context.Context, id string) error {
	return c.w.do("controller.shutdown", func() {
		delete(c.w.holds, "bundle "+id)
		delete(c.w.holds, "shim "+id)
	})
}

func (controller) Metrics(context.Context, string) (*anypb.Any, error) {
	return nil, errdefs.ErrNotImplemented
}

func (c controller) Update(_ context.Context, id string, r *specs.LinuxResources, _ map[string]string) error {
	return c.w.do("controller.update", func() { c.w.limits[id] = *r.Memory.Limit })
}

type tasks struct{ w *world }

// onlyBundle is the state of a task that has a bundle and is not known to its shim.
const onlyBundle = "only a bundle"

func (k tasks) Create(_ context.Context, spec port.TaskSpec) (uint32, error) {
	if _, err := k.w.proc(spec.ContainerID); err == nil {
		return 0, errdefs.ErrAlreadyExists
	}
	if spec.Checkpoint != "" {
		b, err := os.ReadFile(filepath.Join(spec.Checkpoint, "pages-1.img"))
		if err != nil {
			return 0, err
		}
		k.w.mu.Lock()
		k.w.applied["pages "+spec.ContainerID] = string(b)
		k.w.mu.Unlock()
	}
	return 42, k.w.do("tasks.create", func() {
		k.w.procs[spec.ContainerID] = &proc{state: "created", done: make(chan struct{})}
	})
}

func (k tasks) Start(_ context.Context, _, id, _ string) (uint32, error) {
	return 42, k.w.do("tasks.start", func() { k.w.procs[id].state = "running" })
}
func (tasks) Exec(context.Context, string, string, port.ExecSpec) error { return nil }
func (k tasks) Wait(ctx context.Context, _, id, _ string) (pod.Exit, error) {
	p, err := k.w.proc(id)
	if err != nil {
		return pod.Exit{}, err
	}
	select {
	case <-p.done:
		return p.exit, nil
	case <-ctx.Done():
		return pod.Exit{}, ctx.Err()
	}
}

func (k tasks) Kill(_ context.Context, _, id, _ string, sig syscall.Signal, _ bool) error {
	p, err := k.w.proc(id)
	if err != nil {
		return err
	}
	k.w.mu.Lock()
	p.signals = append(p.signals, sig)
	stubborn := p.stubborn
	k.w.mu.Unlock()
	if sig == syscall.SIGKILL || !stubborn {
		k.w.end(id, 128+uint32(sig))
	}
	return nil
}

func (k tasks) Delete(_ context.Context, _, id, _ string) (pod.Exit, error) {
	p, err := k.w.proc(id)
	if err != nil {
		return pod.Exit{}, err
	}
	k.w.end(id, 137)
	return p.exit, k.w.do("tasks.delete", func() { delete(k.w.procs, id) })
}

func (k tasks) State(_ context.Context, _, id, _ string) (port.TaskState, error) {
	p, err := k.w.proc(id)
	if err != nil {
		return port.TaskState{}, err
	}
	k.w.mu.Lock()
	defer k.w.mu.Unlock()
	if p.state == onlyBundle {
		return port.TaskState{}, errdefs.ErrNotFound
	}
	return port.TaskState{Status: p.state, Pid: 42}, nil
}
func (tasks) Pids(context.Context, string, string) ([]uint32, error) { return nil, nil }
func (tasks) ResizePty(context.Context, string, string, string, pod.TerminalSize) error {
	return nil
}
func (tasks) CloseIO(context.Context, string, string, string) error { return nil }

// Update changes the limit also where it fails, as a runtime does that is refused half way.
func (k tasks) Update(_ context.Context, _, id string, r *specs.LinuxResources, _ map[string]string) error {
	k.w.mu.Lock()
	if r.Memory != nil && r.Memory.Limit != nil {
		k.w.limits[id] = *r.Memory.Limit
	}
	if r.CPU != nil && r.CPU.Cpus != "" {
		k.w.cpus[id] = r.CPU.Cpus
	}
	k.w.mu.Unlock()
	return k.w.do("tasks.update", func() {})
}

func (tasks) Stats(context.Context, string, string) (*anypb.Any, error) { return nil, nil }

// move changes the state of a running or paused process.
func (k tasks) move(op, id, from, to string) error {
	p, err := k.w.proc(id)
	if err != nil {
		return err
	}
	var wrong error
	err = k.w.do(op, func() {
		if p.state != from {
			wrong = fmt.Errorf("task is %s: %w", p.state, errdefs.ErrFailedPrecondition)
			return
		}
		p.state = to
		k.w.steps = append(k.w.steps, op+" "+id)
	})
	return errors.Join(err, wrong)
}

func (k tasks) Pause(_ context.Context, _, id string) error {
	return k.move("tasks.pause", id, "running", "paused")
}

func (k tasks) Resume(_ context.Context, _, id string) error {
	return k.move("tasks.resume", id, "paused", "running")
}

func (k tasks) Checkpoint(ctx context.Context, _, id string, spec port.CheckpointSpec) error {
	k.w.mu.Lock()
	slow := k.w.slow
	k.w.mu.Unlock()
	err := os.MkdirAll(spec.ImagePath, 0o700)
	if err == nil {
		err = os.WriteFile(filepath.Join(spec.ImagePath, "pages-1.img"), []byte("pages of "+id), 0o600)
	}
	if err == nil {
		err = k.move("tasks.checkpoint", id, "paused", "paused")
	}
	if err == nil && slow {
		<-ctx.Done()
		err = context.Cause(ctx)
	}
	return err
}

func (k tasks) CheckpointReady(context.Context, pod.Handler) error {
	return k.w.do("criu", func() {})
}

// Clear ends and removes what a shim left.
func (k tasks) Clear(_ context.Context, _ pod.Handler, id, _ string) error {
	return k.w.do("tasks.clear", func() { delete(k.w.holds, "cgroup "+id) })
}

type ioPort struct{ w *world }

func (i ioPort) Open(_ context.Context, id string, _ port.IOSpec) (pod.Stdio, error) {
	return pod.Stdio{}, i.w.do("io.open", func() { i.w.holds["io "+id] = true })
}
func (ioPort) ReopenLog(context.Context, string) error           { return nil }
func (ioPort) Attach(context.Context, string, pod.Streams) error { return nil }
func (ioPort) Drain(context.Context, string) error               { return nil }
func (i ioPort) Close(_ context.Context, id string) error {
	return i.w.do("io.close", func() { delete(i.w.holds, "io "+id) })
}

func (ioPort) OpenExec(context.Context, string, string, bool, pod.Streams) (port.ExecIO, error) {
	return nil, errdefs.ErrNotImplemented
}

type specPort struct{ w *world }

func (specPort) Container(_ context.Context, in port.SpecInput) (*specs.Spec, port.SpecResult, error) {
	if len(in.Container.GetCommand()) == 0 {
		return nil, port.SpecResult{}, fmt.Errorf("command: %w", errdefs.ErrInvalidArgument)
	}
	return &specs.Spec{Process: &specs.Process{Args: in.Container.GetCommand()}, Linux: &specs.Linux{CgroupsPath: "/" + in.ContainerID}}, port.SpecResult{}, nil
}

func (specPort) Init(in port.SpecInput) (*specs.Spec, error) {
	return &specs.Spec{Linux: &specs.Linux{CgroupsPath: "/pods/" + in.SandboxID}}, nil
}

func (specPort) Exec(*specs.Spec, []string, bool, pod.Handler) specs.Process { return specs.Process{} }

func (specPort) Adjust(given *specs.Spec, adj *nri.ContainerAdjustment) (*specs.Spec, error) {
	spec, process := *given, *given.Process
	for _, kv := range adj.GetEnv() {
		if kv.GetKey() == "BAD" {
			return nil, fmt.Errorf("BAD: %w", errdefs.ErrInvalidArgument)
		}
		process.Env = append(slices.Clone(process.Env), kv.GetKey()+"="+kv.GetValue())
	}
	spec.Process = &process
	return &spec, nil
}

func (specPort) Merge(_, update *criv1.LinuxContainerResources) *criv1.LinuxContainerResources {
	return update
}

func (specPort) MergeNRI(c *criv1.LinuxContainerResources, _ *nri.LinuxResources) *criv1.LinuxContainerResources {
	return c
}

func (specPort) SetResources(spec *specs.Spec, r *criv1.LinuxContainerResources, _ *nri.LinuxResources) (change, undo *specs.LinuxResources, err error) {
	undo = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(int64(-1))}}
	if spec.Linux.Resources != nil {
		undo = spec.Linux.Resources
	}
	change = &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(r.GetMemoryLimitInBytes())}}
	if r.GetCpusetCpus() != "" {
		change.CPU = &specs.LinuxCPU{Cpus: r.GetCpusetCpus()}
	}
	spec.Linux.Resources = &specs.LinuxResources{Memory: change.Memory}
	for _, l := range r.GetHugepageLimits() {
		spec.Linux.Resources.HugepageLimits = append(spec.Linux.Resources.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: l.GetPageSize(), Limit: l.GetLimit()})
	}
	return change, undo, nil
}

func (specPort) Limits(r *criv1.LinuxContainerResources) (*specs.LinuxResources, error) {
	return &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(r.GetMemoryLimitInBytes())}}, nil
}

func (p specPort) PodLabel(*criv1.PodSandboxConfig) (string, error) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	label := fmt.Sprintf("u:r:t:s0:c%d", len(p.w.labels))
	p.w.labels[label] = true
	return label, nil
}

func (p specPort) KeepLabel(label string) error {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.labels[label] = true
	return nil
}

func (p specPort) FreeLabel(label string) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.labels[label] = false
}

func (specPort) Resources(*specs.Spec) *criv1.LinuxContainerResources { return nil }

func (specPort) PodView(s *recordv1.Sandbox) *nri.PodSandbox {
	return &nri.PodSandbox{Id: s.GetId(), Ips: s.GetIps()}
}

func (specPort) ContainerView(c *recordv1.Container, spec *specs.Spec) *nri.Container {
	v := &nri.Container{Id: c.GetId(), PodSandboxId: c.GetSandboxId()}
	if spec.Process != nil {
		v.Env = spec.Process.Env
	}
	return v
}

type programs struct{ w *world }

func (p programs) Check(string, uint32, *specs.Process) error {
	return p.w.do("programs.check", func() {})
}

func (p programs) CheckExec(string, uint32, *specs.Process) error { return nil }

func (p programs) Heeds(uint32, syscall.Signal) bool {
	return p.w.do("programs.heeds", func() {}) == nil
}

type cgroups struct{}

func (cgroups) OOMKills(string) uint64 { return 0 }

func (cgroups) Sets(string) (cpus, mems string) { return "0-3", "0" }

func (cgroups) SetOOMScore(context.Context, string, string, int, int) error { return nil }

var errInjected = errors.New("injected")

func (specPort) PinRequest(*criv1.PodSandboxConfig) (port.PinRequest, error) {
	return port.PinRequest{Network: true}, nil
}

func (namespaces) List() ([]string, error) { return nil, nil }
