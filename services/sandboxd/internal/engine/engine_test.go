package engine_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store/storetest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func podConfig(name string) *criv1.PodSandboxConfig {
	return &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: name, Namespace: "default", Uid: "u-" + name}}
}

func containerConfig(name string) *criv1.ContainerConfig {
	return &criv1.ContainerConfig{
		Metadata: &criv1.ContainerMetadata{Name: name}, Image: &criv1.ImageSpec{Image: "busybox"}, Command: []string{"sleep"},
	}
}

func runPod(t *testing.T, n *node, name string) string {
	t.Helper()
	rec, existing, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig(name), "")
	if err != nil || existing {
		t.Fatalf("prepare: existing=%t, %v", existing, err)
	}
	err = n.Sandboxes.Commit(t.Context(), rec.GetId())
	if err != nil {
		t.Fatal(err)
	}
	return rec.GetId()
}

func createContainer(t *testing.T, n *node, sandboxID, name string) string {
	t.Helper()
	id, _, err := n.Containers.Prepare(t.Context(), "gw", sandboxID, containerConfig(name), "")
	if err != nil {
		t.Fatal(err)
	}
	err = n.Containers.Commit(t.Context(), id, nil)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func startContainer(t *testing.T, n *node, sandboxID, name string) string {
	t.Helper()
	id := createContainer(t, n, sandboxID, name)
	err := n.Tasks.Start(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func state(t *testing.T, n *node, id string) *recordv1.Container {
	t.Helper()
	rec, err := n.Views.Container(id)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func topics(t *testing.T, n *node) []string {
	t.Helper()
	entries, err := n.st.Events(1000)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Event.GetTopic())
	}
	return out
}

func TestSandboxIsSeenOnlyAfterCommit(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	rec, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
	if err != nil {
		t.Fatal(err)
	}
	if list, _ := n.Views.Sandboxes(); len(list) != 0 {
		t.Errorf("prepared sandbox is listed: %v", list)
	}
	if _, err := n.Views.Sandbox(rec.GetId()); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("status of a prepared sandbox: %v, want not found", err)
	}
	_, _, err = n.Containers.Prepare(t.Context(), "gw", rec.GetId(), containerConfig("c"), "")
	if !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("container in a prepared sandbox: %v, want not found", err)
	}
	for range 2 { // a commit is idempotent
		err = n.Sandboxes.Commit(t.Context(), rec.GetId())
		if err != nil {
			t.Fatal(err)
		}
	}
	got, err := n.Views.Sandbox(rec.GetId())
	if err != nil || !slices.Equal(got.GetIps(), []string{"10.0.0.2", "fd00::2"}) {
		t.Errorf("record = %v, %v", got, err)
	}
}

func TestRepeatedRequestGetsTheSameSandbox(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id := runPod(t, n, "a")
	rec, existing, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
	if err != nil || !existing || rec.GetId() != id {
		t.Errorf("repeat = %s, %t, %v; want %s", rec.GetId(), existing, err, id)
	}
	other := podConfig("a")
	other.Hostname = "other"
	_, _, err = n.Sandboxes.Prepare(t.Context(), "gw", other, "")
	if !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("same name, other configuration: %v, want already exists", err)
	}
	if got := n.w.called("network.attach"); got != 1 {
		t.Errorf("%d ADDs, want 1", got)
	}
}

func TestFailedPreparationLeavesNothing(t *testing.T) {
	for _, op := range []string{"namespaces.pin", "network.attach", "namespaces.interfaces", "files.logs", "files.make", "controller.create", "controller.start"} {
		t.Run(op, func(t *testing.T) {
			n := start(t, newWorld(t), "boot")
			n.session(t, "gw")
			n.w.set(op, errInjected)
			_, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
			if !errors.Is(err, errInjected) {
				t.Fatalf("error = %v", err)
			}
			if held := n.w.held(); len(held) != 0 {
				t.Errorf("left behind: %v", held)
			}
			n.w.set(op, nil)
			runPod(t, n, "a") // the name is free
		})
	}
}

func TestNetworkThatCannotBeReleasedIsReleasedLater(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	w.set("controller.start", errInjected)
	w.set("network.detach", errInjected)
	_, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
	if !errors.Is(err, errInjected) {
		t.Fatalf("error = %v", err)
	}
	if held := w.held(); len(held) != 1 {
		t.Fatalf("held = %v, want the network only", held)
	}
	n.close() // the debt survives a restart
	w.set("network.detach", nil)
	n = start(t, w, "boot")
	eventually(t, "network released", func() bool { return len(w.held()) == 0 })
	eventually(t, "debt forgotten", func() bool {
		snap, err := n.st.Load()
		return err == nil && len(snap.Releases) == 0
	})
}

// Whoever has a network or may have one is known as such, whatever its state, and nobody
// else: plugins are told to release what others have.
func TestNetworkedSandboxes(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	networked := func() []string {
		out := []string{}
		for _, h := range n.Views.Networked() {
			out = append(out, h.SandboxID)
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
	want := func(what string, ids ...string) {
		t.Helper()
		slices.Sort(ids)
		if got := networked(); !slices.Equal(got, ids) {
			t.Errorf("%s: networked are %v, want %v", what, got, ids)
		}
	}
	want("at first")
	ready := runPod(t, n, "ready")
	stopped := runPod(t, n, "stopped")
	preparing, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("preparing"), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Sandboxes.Stop(t.Context(), stopped); err != nil {
		t.Fatal(err)
	}
	want("after a stop", ready, preparing.GetId())
	w.set("network.detach", errInjected)
	if err := n.Sandboxes.Abort(t.Context(), preparing.GetId()); err != nil {
		t.Fatal(err)
	}
	want("while one is owed", ready, preparing.GetId())
	if err := n.Sandboxes.Stop(t.Context(), ready); err == nil {
		t.Error("no error")
	}
	n.close()
	unreadable := strings.Repeat("f", 64)
	storetest.Spoil(t, w.path, unreadable)
	n = start(t, w, "boot")
	want("after a restart", ready, preparing.GetId(), unreadable)
	w.set("network.detach", nil)
	if err := n.Sandboxes.Stop(t.Context(), ready); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the owed one is released", func() bool { return slices.Equal(networked(), []string{unreadable}) })
}

// A commit that failed is repeated with the specification as it was prepared.
func TestRepeatedCommitAdjustsOnce(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id, _, err := n.Containers.Prepare(t.Context(), "gw", runPod(t, n, "a"), containerConfig("c"), "")
	if err != nil {
		t.Fatal(err)
	}
	adjust := func(keys ...string) error {
		adj := &nri.ContainerAdjustment{}
		for _, k := range keys {
			adj.Env = append(adj.Env, &nri.KeyValue{Key: k, Value: "1"})
		}
		return n.Containers.Commit(t.Context(), id, adj)
	}
	if err := adjust("A", "BAD"); !errdefs.IsInvalidArgument(err) {
		t.Fatalf("bad adjustment: %v", err)
	}
	if err := adjust("A", "B"); err != nil {
		t.Fatal(err)
	}
	rec, err := n.Views.Container(id)
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(rec.GetSpec(), &spec); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"A=1", "B=1"}, spec.Process.Env); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
}

func TestLostSessionIsAborted(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	lose := n.session(t, "gw")
	id := runPod(t, n, "kept")
	_, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
	if err != nil {
		t.Fatal(err)
	}
	cid, _, err := n.Containers.Prepare(t.Context(), "gw", id, containerConfig("c"), "")
	if err != nil {
		t.Fatal(err)
	}
	lose()
	eventually(t, "only the committed sandbox is left", func() bool {
		return len(n.w.held()) == 5 && !slices.Contains(n.w.held(), "rootfs "+cid)
	})
	_, _, err = n.Sandboxes.Prepare(t.Context(), "gw", podConfig("a"), "")
	if !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("preparation in a lost session: %v, want unavailable", err)
	}
}

func TestContainerLifeAndEvents(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	id := startContainer(t, n, sid, "c")
	n.w.end(id, 3)
	eventually(t, "exit recorded and task deleted", func() bool { return state(t, n, id).GetTaskDeleted() })
	rec := state(t, n, id)
	if rec.GetExitCode() != 3 || rec.GetReason() != "Error" || rec.GetState() != recordv1.ContainerState_CONTAINER_STATE_EXITED {
		t.Errorf("record = %v", rec)
	}
	if rec.GetFinishedAt().AsTime().Before(rec.GetStartedAt().AsTime()) || rec.GetStartedAt().AsTime().Before(rec.GetCreatedAt().AsTime()) {
		t.Errorf("times out of order: %v", rec)
	}
	for range 2 { // removal is idempotent
		_, err := n.Containers.Remove(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
	}
	err := n.Sandboxes.Remove(t.Context(), sid)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"/sandboxes/start", "/containers/create", "/tasks/create", "/tasks/start", "/tasks/exit", "/tasks/delete",
		"/containers/delete", "/sandboxes/exit", "/sandboxes/delete",
	}
	if got := topics(t, n); !slices.Equal(got, want) {
		t.Errorf("events = %v\nwant     %v", got, want)
	}
	if held := n.w.held(); len(held) != 0 {
		t.Errorf("left behind: %v", held)
	}
}

// A shim that watches a group of the first hierarchy says the same of a lack of memory and of the
// group's removal.
func TestHintsOfALackOfMemory(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	hinted, other := startContainer(t, n, sid, "hinted"), startContainer(t, n, sid, "other")
	for range 2 {
		n.Tasks.HintOOM(t.Context(), hinted)
	}
	n.w.end(other, 0)
	eventually(t, "exit recorded and task deleted", func() bool { return state(t, n, other).GetTaskDeleted() })
	n.Tasks.HintOOM(t.Context(), other)
	n.Tasks.HintOOM(t.Context(), "unknown")
	count := 0
	for _, topic := range topics(t, n) {
		if topic == "/tasks/oom" {
			count++
		}
	}
	if count != 1 {
		t.Errorf("%d events of a lack of memory, want the one of the container that ran", count)
	}
}

func TestFailedStartIsAStartError(t *testing.T) {
	for _, op := range []string{"io.open", "rootfs.mounts", "tasks.create", "tasks.start"} {
		t.Run(op, func(t *testing.T) {
			n := start(t, newWorld(t), "boot")
			n.session(t, "gw")
			sid := runPod(t, n, "a")
			id := createContainer(t, n, sid, "c")
			n.w.set(op, errInjected)
			err := n.Tasks.Start(t.Context(), id)
			if !errors.Is(err, errInjected) {
				t.Fatalf("error = %v", err)
			}
			rec := state(t, n, id)
			if rec.GetExitCode() != 128 || rec.GetReason() != "StartError" || rec.GetFinishedAt() == nil {
				t.Errorf("record = %v", rec)
			}
			n.w.set(op, nil)
			err = n.Tasks.Start(t.Context(), id)
			if !errors.Is(err, errdefs.ErrFailedPrecondition) {
				t.Errorf("second start: %v, want failed precondition", err)
			}
			_, err = n.Containers.Remove(t.Context(), id)
			if err != nil {
				t.Errorf("remove: %v", err)
			}
		})
	}
}

// A stop signal that comes before the process has a handler would be lost.
func TestStopSignalWaitsForItsHandler(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	p, err := n.w.proc(id)
	if err != nil {
		t.Fatal(err)
	}
	n.w.set("programs.heeds", errors.New("no handler"))
	stopped := make(chan error, 1)
	go func() {
		_, err := n.Containers.Stop(t.Context(), id, time.Hour)
		stopped <- err
	}()
	eventually(t, "looks for a handler", func() bool {
		n.w.mu.Lock()
		defer n.w.mu.Unlock()
		return n.w.calls["programs.heeds"] > 2
	})
	n.w.mu.Lock()
	early := len(p.signals)
	n.w.mu.Unlock()
	n.w.set("programs.heeds", nil)
	if err := <-stopped; err != nil || early != 0 {
		t.Errorf("%d signals before there was a handler; %v", early, err)
	}
	if want := []syscall.Signal{syscall.SIGTERM}; !slices.Equal(p.signals, want) {
		t.Errorf("signals = %v, want %v", p.signals, want)
	}
}

func TestShortestStopTimeoutWinsAndSignalIsSentOnce(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id := startContainer(t, n, runPod(t, n, "a"), "c")
	p, err := n.w.proc(id)
	if err != nil {
		t.Fatal(err)
	}
	p.stubborn = true
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			_, err := n.Containers.Stop(t.Context(), id, time.Hour)
			if err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "first signal", func() bool {
		n.w.mu.Lock()
		defer n.w.mu.Unlock()
		return len(p.signals) > 0
	})
	_, err = n.Containers.Stop(t.Context(), id, 0)
	if err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	if want := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}; !slices.Equal(p.signals, want) {
		t.Errorf("signals = %v, want %v", p.signals, want)
	}
	if got := state(t, n, id).GetExitCode(); got != 137 {
		t.Errorf("exit code = %d, want 137", got)
	}
}

func TestStoppingRacesWithCreating(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	for range 30 {
		sid := runPod(t, n, "a")
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				err := n.Sandboxes.Stop(t.Context(), sid)
				if err != nil {
					t.Errorf("stop: %v", err)
				}
			})
		}
		for _, name := range []string{"x", "y", "z"} {
			wg.Go(func() {
				id, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig(name), "")
				if err == nil {
					err = n.Containers.Commit(t.Context(), id, nil)
				}
				if err == nil {
					err = n.Tasks.Start(t.Context(), id)
				}
				if err != nil && !errdefs.IsFailedPrecondition(err) && !errdefs.IsNotFound(err) {
					t.Errorf("create and start: %v", err)
				}
			})
		}
		wg.Go(func() {
			err := n.Sandboxes.Remove(t.Context(), sid)
			if err != nil {
				t.Errorf("remove: %v", err)
			}
		})
		wg.Wait()
		err := n.Sandboxes.Remove(t.Context(), sid)
		if err != nil {
			t.Fatal(err)
		}
	}
	if held := n.w.held(); len(held) != 0 {
		t.Errorf("left behind: %v", held)
	}
}

func TestRestartFindsEverything(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	running := startContainer(t, n, sid, "running")
	ended := startContainer(t, n, sid, "ended")
	created := createContainer(t, n, sid, "created")
	_, _, err := n.Sandboxes.Prepare(t.Context(), "gw", podConfig("half"), "")
	if err != nil {
		t.Fatal(err)
	}
	half, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig("half"), "")
	if err != nil {
		t.Fatal(err)
	}
	n.close()
	w.end(ended, 7)

	n = start(t, w, "boot")
	eventually(t, "exit of the time between", func() bool { return state(t, n, ended).GetTaskDeleted() })
	if got := state(t, n, ended).GetExitCode(); got != 7 {
		t.Errorf("exit code = %d, want 7", got)
	}
	if got := state(t, n, running).GetState(); got != recordv1.ContainerState_CONTAINER_STATE_RUNNING {
		t.Errorf("running container is %v", got)
	}
	err = n.Tasks.Start(t.Context(), created)
	if err != nil {
		t.Errorf("start of a container made before the restart: %v", err)
	}
	eventually(t, "half-made objects removed", func() bool {
		held := w.held()
		return !slices.Contains(held, "rootfs "+half) && len(slices.DeleteFunc(held, func(h string) bool { return h[:4] != "shim" })) == 1
	})
	exits := 0
	for _, topic := range topics(t, n) {
		if topic == "/tasks/exit" || topic == "/tasks/delete" {
			exits++
		}
	}
	if exits != 2 {
		t.Errorf("%d exit and delete events, want one of each", exits)
	}
}

func TestRebootEndsEverything(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot 1")
	n.session(t, "gw")
	sid := runPod(t, n, "a")
	id := startContainer(t, n, sid, "c")
	n.close()

	n = start(t, w, "boot 2")
	n.session(t, "gw")
	rec := state(t, n, id)
	if rec.GetState() != recordv1.ContainerState_CONTAINER_STATE_EXITED || rec.GetExitCode() != 255 || rec.GetReason() != "Unknown" || rec.GetFinishedAt() == nil {
		t.Errorf("record = %v", rec)
	}
	next := podConfig("a")
	next.Metadata.Attempt = 1
	_, _, err := n.Sandboxes.Prepare(t.Context(), "gw", next, "")
	if err != nil {
		t.Errorf("next attempt: %v", err)
	}
	eventually(t, "network of before the reboot released", func() bool { return !slices.Contains(w.held(), "network "+sid) })
	err = n.Sandboxes.Remove(t.Context(), sid)
	if err != nil {
		t.Errorf("remove: %v", err)
	}
}
