package sequence_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/backendtest"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/sequence"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var (
	_ sequence.Hub     = (*backend.Hub)(nil)
	_ sequence.Hub     = backend.NoHub{}
	_ sequence.Session = (*backend.Session)(nil)
)

type silent struct{}

func (silent) Begin(string) func(error) { return func(error) {} }
func (silent) Join(string)              {}
func (silent) Held(time.Duration)       {}

// bench is a gateway's inside with stand-ins around it.
type bench struct {
	*sequence.Sequences
	journal  *backendtest.Journal
	sandboxd *backendtest.Sandboxd
	hub      *backendtest.Hub
}

// newBench starts a bench whose hub listens to events.
func newBench(t *testing.T, events int32) *bench {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	log := slog.New(slog.DiscardHandler)
	journal := &backendtest.Journal{}
	b := &bench{
		journal:  journal,
		sandboxd: backendtest.NewSandboxd(journal),
		hub:      backendtest.NewHub(journal, &nriv1.HubState{Generation: 7, SubscribedEvents: events, Ready: true}),
	}
	sandboxd := backend.NewSandboxd(testkit.GRPC(t, tel, b.sandboxd.Registrations()...), testkit.Patience)
	session := backend.NewSession(sandboxd.Node, testkit.Patience, log)
	hub := backend.NewHub(testkit.GRPC(t, tel, b.hub.Registrations()...), backend.HubConfig{Hold: testkit.Patience}, silent{}, log)
	ops := operation.New(log, silent{})
	b.Sequences = sequence.New(sequence.Parts{
		Sandboxes: sandboxd.Sandboxes, Containers: sandboxd.Containers, Node: sandboxd.Node,
		Session: session, Hub: hub, Operations: ops,
		Limits: sequence.Limits{Work: time.Minute, Undo: testkit.Patience}, Log: log,
	})
	ctx, cancel := context.WithCancel(t.Context())
	var tasks sync.WaitGroup
	tasks.Go(func() { _ = session.Run(ctx) })
	tasks.Go(func() { _ = hub.Run(ctx, sandboxd.Node, b.Sequences) })
	t.Cleanup(func() {
		if err := ops.Close(context.Background(), testkit.Patience); err != nil {
			t.Error(err)
		}
		cancel()
		tasks.Wait()
	})
	testkit.Eventually(t, testkit.Patience, func() error {
		return errors.Join(session.Ready(t.Context()), hub.Ready(t.Context()))
	})
	return b
}

func sandboxRequest() *criv1.RunPodSandboxRequest {
	return &criv1.RunPodSandboxRequest{Config: &criv1.PodSandboxConfig{
		Metadata: &criv1.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u1"},
	}}
}

func containerRequest(sandbox string) *criv1.CreateContainerRequest {
	return &criv1.CreateContainerRequest{
		PodSandboxId:  sandbox,
		Config:        &criv1.ContainerConfig{Metadata: &criv1.ContainerMetadata{Name: "app"}, Image: &criv1.ImageSpec{Image: "i"}},
		SandboxConfig: sandboxRequest().GetConfig(),
	}
}

// expect compares what was called since the last time.
func (b *bench) expect(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, b.journal.Take()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestLifeOfAPod(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	ctx := t.Context()

	sandbox := must[string](t)(b.RunPodSandbox(ctx, sandboxRequest()))
	b.expect(t, "PrepareSandbox", "hub.RunPodSandbox", "CommitSandbox")

	again := must[string](t)(b.RunPodSandbox(ctx, sandboxRequest()))
	if again != sandbox {
		t.Errorf("repeated RunPodSandbox = %s, want %s", again, sandbox)
	}
	b.expect(t, "PrepareSandbox")

	container := must[string](t)(b.CreateContainer(ctx, containerRequest(sandbox)))
	b.expect(t, "PrepareContainer", "hub.CreateContainer", "CommitContainer", "hub.PostCreateContainer")

	ok(t, b.StartContainer(ctx, container))
	b.expect(t, "CreateTask", "hub.StartContainer", "StartContainer", "hub.PostStartContainer")

	ok(t, b.UpdateContainerResources(ctx, &criv1.UpdateContainerResourcesRequest{ContainerId: container}))
	b.expect(t, "DescribeContainer", "hub.UpdateContainer", "UpdateContainerResources", "hub.PostUpdateContainer")

	ok(t, b.UpdatePodSandboxResources(ctx, &criv1.UpdatePodSandboxResourcesRequest{PodSandboxId: sandbox}))
	b.expect(t, "ListInventory", "hub.UpdatePodSandbox", "UpdateSandboxResources", "hub.PostUpdatePodSandbox")

	ok(t, b.ContainerExited(ctx, container))
	b.expect(t, "DescribeContainer", "hub.StopContainer")

	ok(t, b.StopContainer(ctx, container, 3))
	b.expect(t, "StopContainer(3)", "hub.StopContainer")

	ok(t, b.RemoveContainer(ctx, container))
	b.expect(t, "StopContainer(0)", "hub.StopContainer", "RemoveContainer", "hub.RemoveContainer")

	must[string](t)(b.CreateContainer(ctx, containerRequest(sandbox)))
	b.journal.Take()
	ok(t, b.StopPodSandbox(ctx, sandbox))
	b.expect(t, "QuiesceSandbox", "hub.StopContainer", "hub.StopPodSandbox", "StopSandbox")

	ok(t, b.RemovePodSandbox(ctx, sandbox))
	b.expect(t, "QuiesceSandbox", "hub.StopContainer", "hub.StopPodSandbox", "StopSandbox",
		"RemoveSandbox", "hub.RemoveContainer", "hub.RemovePodSandbox")
}

func TestLifeOfAPodWithoutPlugins(t *testing.T) {
	b := newBench(t, 0)
	ctx := t.Context()
	sandbox := must[string](t)(b.RunPodSandbox(ctx, sandboxRequest()))
	container := must[string](t)(b.CreateContainer(ctx, containerRequest(sandbox)))
	ok(t, b.StartContainer(ctx, container))
	ok(t, b.UpdateContainerResources(ctx, &criv1.UpdateContainerResourcesRequest{ContainerId: container}))
	ok(t, b.UpdatePodSandboxResources(ctx, &criv1.UpdatePodSandboxResourcesRequest{PodSandboxId: sandbox}))
	ok(t, b.ContainerExited(ctx, container))
	ok(t, b.StopContainer(ctx, container, 3))
	ok(t, b.RemoveContainer(ctx, container))
	ok(t, b.RemovePodSandbox(ctx, sandbox))
	b.expect(t, "PrepareSandbox", "CommitSandbox", "PrepareContainer", "CommitContainer", "StartContainer",
		"UpdateContainerResources", "UpdateSandboxResources", "StopContainer(3)", "RemoveContainer",
		"QuiesceSandbox", "StopSandbox", "RemoveSandbox")
}

func TestRunPodSandboxUndoesEachFailedStep(t *testing.T) {
	undo := []string{"hub.StopPodSandbox", "hub.RemovePodSandbox", "AbortSandbox"}
	refused := errdefs.ErrFailedPrecondition
	for _, tt := range []struct {
		name  string
		fail  func(b *bench)
		calls []string
	}{
		{
			"prepare", func(b *bench) { b.sandboxd.Failures.Fail("PrepareSandbox", refused) },
			[]string{"PrepareSandbox"},
		},
		{
			"plugins", func(b *bench) { b.hub.Failures.Fail("RunPodSandbox", refused) },
			append([]string{"PrepareSandbox", "hub.RunPodSandbox"}, undo...),
		},
		{
			"commit", func(b *bench) { b.sandboxd.Failures.Fail("CommitSandbox", refused) },
			append([]string{"PrepareSandbox", "hub.RunPodSandbox", "CommitSandbox"}, undo...),
		},
		{
			"commit and undo", func(b *bench) {
				b.sandboxd.Failures.Fail("CommitSandbox", refused)
				b.hub.Failures.Fail("StopPodSandbox", errdefs.ErrInternal)
				b.hub.Failures.Fail("RemovePodSandbox", errdefs.ErrInternal)
			},
			append([]string{"PrepareSandbox", "hub.RunPodSandbox", "CommitSandbox"}, undo...),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, backendtest.AllEvents())
			tt.fail(b)
			if _, err := b.RunPodSandbox(t.Context(), sandboxRequest()); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("RunPodSandbox: %v, want the step's error", err)
			}
			b.expect(t, tt.calls...)
			if _, err := b.RunPodSandbox(t.Context(), sandboxRequest()); err != nil {
				t.Errorf("retry: %v", err)
			}
		})
	}
}

func TestCommitIsRepeatedWhenItsAnswerIsLost(t *testing.T) {
	b := newBench(t, 0)
	b.sandboxd.Failures.Fail("CommitSandbox", errdefs.ErrUnavailable)
	must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
	b.expect(t, "PrepareSandbox", "CommitSandbox", "CommitSandbox")
}

func TestCreateContainerUndoesEachFailedStep(t *testing.T) {
	undo := []string{"hub.StopContainer", "hub.RemoveContainer", "AbortContainer"}
	refused := errdefs.ErrFailedPrecondition
	for _, tt := range []struct {
		name  string
		fail  func(b *bench)
		calls []string
	}{
		{
			"prepare", func(b *bench) { b.sandboxd.Failures.Fail("PrepareContainer", refused) },
			[]string{"PrepareContainer"},
		},
		{
			"plugins", func(b *bench) { b.hub.Failures.Fail("CreateContainer", refused) },
			append([]string{"PrepareContainer", "hub.CreateContainer"}, undo...),
		},
		{
			"update of another", func(b *bench) {
				b.hub.AnswerCreate(&nri.CreateContainerResponse{Update: []*nri.ContainerUpdate{limit("other", 1)}})
				b.sandboxd.AddContainer("sb", "other")
				b.sandboxd.Failures.Fail("UpdateContainerResources", refused)
			},
			append([]string{"PrepareContainer", "hub.CreateContainer", "UpdateContainerResources", "DescribeContainer"}, undo...),
		},
		{
			"commit", func(b *bench) { b.sandboxd.Failures.Fail("CommitContainer", refused) },
			append([]string{"PrepareContainer", "hub.CreateContainer", "CommitContainer"}, undo...),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, backendtest.AllEvents())
			sandbox := must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
			b.journal.Take()
			tt.fail(b)
			if _, err := b.CreateContainer(t.Context(), containerRequest(sandbox)); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("CreateContainer: %v, want the step's error", err)
			}
			b.expect(t, tt.calls...)
		})
	}
}

func limit(id string, bytes int64) *nri.ContainerUpdate {
	u := &nri.ContainerUpdate{}
	u.SetContainerId(id)
	u.SetLinuxMemoryLimit(bytes)
	return u
}

func TestCreateContainerDoesWhatPluginsWant(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	sandbox := must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
	b.sandboxd.AddContainer(sandbox, "other")
	b.sandboxd.AddContainer(sandbox, "victim")
	b.sandboxd.AddContainer(sandbox, "ended")
	b.sandboxd.SetState("ended", criv1.ContainerState_CONTAINER_EXITED)
	b.sandboxd.Failures.Fail("UpdateContainerResources", nil, errdefs.ErrFailedPrecondition)
	adjust := &nri.ContainerAdjustment{Annotations: map[string]string{"a": "b"}}
	b.hub.AnswerCreate(&nri.CreateContainerResponse{
		Adjust: adjust,
		Update: []*nri.ContainerUpdate{limit("other", 42), limit("ended", 4), limit("nobody", 5)},
		Evict:  []*nri.ContainerEviction{{ContainerId: "victim", Reason: "memory"}},
	})
	b.journal.Take()
	id := must[string](t)(b.CreateContainer(t.Context(), containerRequest(sandbox)))
	b.expect(t, "PrepareContainer", "hub.CreateContainer", "StopContainer(10)", "hub.StopContainer",
		"UpdateContainerResources", "UpdateContainerResources", "DescribeContainer", "UpdateContainerResources", "CommitContainer", "hub.PostCreateContainer")
	if got := b.sandboxd.Adjustment(id).GetAnnotations()["a"]; got != "b" {
		t.Errorf("committed with annotation %q, want b", got)
	}
	updates := b.sandboxd.Updates()
	if len(updates) != 1 || updates[0].GetContainerId() != "other" || updates[0].GetNri().GetMemory().GetLimit().GetValue() != 42 {
		t.Errorf("updates done: %v, want other to 42", updates)
	}
}

func TestUpdateContainerTakesTheAmendment(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	b.sandboxd.AddContainer("sb", "c1")
	b.sandboxd.AddContainer("sb", "c2")
	// The answer of real plugins may end with an empty entry.
	b.hub.AnswerUpdate(&nri.UpdateContainerResponse{Update: []*nri.ContainerUpdate{limit("c1", 7), limit("c2", 8), {}}})
	ok(t, b.UpdateContainerResources(t.Context(), &criv1.UpdateContainerResourcesRequest{
		ContainerId: "c1", Linux: &criv1.LinuxContainerResources{MemoryLimitInBytes: 5}, Annotations: map[string]string{"of": "c1"},
	}))
	got := map[string][2]int64{}
	for _, u := range b.sandboxd.Updates() {
		if of := u.GetAnnotations()["of"]; (of == "c1") != (u.GetContainerId() == "c1") {
			t.Errorf("the update of %s has the annotations of %q", u.GetContainerId(), of)
		}
		got[u.GetContainerId()] = [2]int64{u.GetLinux().GetMemoryLimitInBytes(), u.GetNri().GetMemory().GetLimit().GetValue()}
	}
	if diff := cmp.Diff(map[string][2]int64{"c1": {5, 7}, "c2": {0, 8}}, got); diff != "" {
		t.Errorf("updates (-want +got):\n%s", diff)
	}
}

func TestFailedStartIsToldAsStop(t *testing.T) {
	for call, calls := range map[string][]string{
		"CreateTask":     {"CreateTask", "DescribeContainer", "hub.StopContainer"},
		"StartContainer": {"CreateTask", "hub.StartContainer", "StartContainer", "DescribeContainer", "hub.StopContainer"},
	} {
		b := newBench(t, backendtest.AllEvents())
		sandbox := must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
		id := must[string](t)(b.CreateContainer(t.Context(), containerRequest(sandbox)))
		b.journal.Take()
		b.sandboxd.Failures.Fail(call, errdefs.ErrNotFound)
		if err := b.StartContainer(t.Context(), id); !errdefs.IsNotFound(err) {
			t.Errorf("StartContainer: %v, want NotFound", err)
		}
		b.expect(t, calls...)
	}
}

// A start that a plugin refuses has failed.
func TestRefusedStart(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	sandbox := must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
	id := must[string](t)(b.CreateContainer(t.Context(), containerRequest(sandbox)))
	b.journal.Take()
	b.hub.Failures.Fail("StartContainer", errdefs.ErrAborted)
	if err := b.StartContainer(t.Context(), id); !errdefs.IsAborted(err) {
		t.Errorf("StartContainer: %v, want the refusal", err)
	}
	b.expect(t, "CreateTask", "hub.StartContainer", "RefuseStart", "DescribeContainer", "hub.StopContainer")
}

func TestUnknownObjectsAreGone(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	ok(t, b.StopPodSandbox(t.Context(), "nobody"))
	ok(t, b.RemovePodSandbox(t.Context(), "nobody"))
	ok(t, b.StopContainer(t.Context(), "nobody", 5))
	ok(t, b.RemoveContainer(t.Context(), "nobody"))
	ok(t, b.ContainerExited(t.Context(), "nobody"))
	b.expect(t, "QuiesceSandbox", "QuiesceSandbox", "RemoveSandbox", "StopContainer(5)", "StopContainer(0)",
		"RemoveContainer", "DescribeContainer")
}

func TestBrokenPluginsDoNotKeepPods(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	sandbox := must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
	must[string](t)(b.CreateContainer(t.Context(), containerRequest(sandbox)))
	for _, call := range []string{"StopContainer", "StopPodSandbox", "RemoveContainer", "RemovePodSandbox"} {
		b.hub.Failures.Fail(call, errdefs.ErrInternal)
	}
	ok(t, b.RemovePodSandbox(t.Context(), sandbox))
}

func TestCallerGoesWorkGoesOn(t *testing.T) {
	b := newBench(t, 0)
	release := b.sandboxd.Failures.Block("PrepareSandbox")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.RunPodSandbox(ctx, sandboxRequest()); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("RunPodSandbox: %v, want the caller's deadline", err)
	}
	var retry sync.WaitGroup
	retry.Go(func() {
		if _, err := b.RunPodSandbox(t.Context(), sandboxRequest()); err != nil {
			t.Errorf("retry: %v", err)
		}
	})
	other := sandboxRequest()
	other.Config.Hostname = "other"
	testkit.Eventually(t, testkit.Patience, func() error {
		if _, err := b.RunPodSandbox(t.Context(), other); !errdefs.IsAborted(err) {
			return errors.New("another configuration was not refused")
		}
		return nil
	})
	time.Sleep(20 * time.Millisecond) // lets the retry join; if it is late it finds the result all the same
	release()
	retry.Wait()
	b.expect(t, "PrepareSandbox", "CommitSandbox")
}

func TestShorterStopIsNotHeldBackByLongerOne(t *testing.T) {
	b := newBench(t, 0)
	b.sandboxd.AddContainer("sb", "c")
	release := b.sandboxd.Failures.Block("StopContainer(60)")
	var long sync.WaitGroup
	long.Go(func() { _ = b.StopContainer(t.Context(), "c", 60) })
	ok(t, b.StopContainer(t.Context(), "c", 0))
	release()
	long.Wait()
}

func TestApplyUpdatesReturnsWhatFailed(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	b.sandboxd.AddContainer("sb", "c")
	b.sandboxd.AddContainer("sb", "stiff")
	b.sandboxd.AddContainer("sb", "ended")
	b.sandboxd.SetState("ended", criv1.ContainerState_CONTAINER_EXITED)
	tolerant := limit("stiff", 1)
	tolerant.SetIgnoreFailure()
	refused := errdefs.ErrFailedPrecondition
	b.sandboxd.Failures.Fail("UpdateContainerResources", refused, refused, nil, refused)
	failed, err := b.ApplyUpdates(t.Context(),
		[]*nri.ContainerUpdate{limit("stiff", 4), tolerant, limit("c", 3), limit("ended", 5), limit("gone", 6)},
		[]*nri.ContainerEviction{{ContainerId: "c"}})
	ok(t, err)
	var ids []string
	for _, u := range failed {
		ids = append(ids, u.GetContainerId())
	}
	if diff := cmp.Diff([]string{"stiff", "ended", "gone"}, ids); diff != "" {
		t.Errorf("failed (-want +got):\n%s", diff)
	}
}

// A container that another operation is making is updated once it is made, if an answer asks for
// that; what a plugin asks for by itself is refused at once.
func TestUpdateOfAContainerInTheMaking(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	sandbox := must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
	b.sandboxd.AddContainer(sandbox, "c")
	b.sandboxd.SetState("c", criv1.ContainerState_CONTAINER_UNKNOWN)
	making := errdefs.ErrFailedPrecondition
	b.sandboxd.Failures.Fail("UpdateContainerResources", making)
	failed, err := b.ApplyUpdates(t.Context(), []*nri.ContainerUpdate{limit("c", 3)}, nil)
	ok(t, err)
	if len(failed) != 1 || len(b.sandboxd.Updates()) != 0 {
		t.Errorf("failed: %v, updates done: %v", failed, b.sandboxd.Updates())
	}
	b.hub.AnswerCreate(&nri.CreateContainerResponse{Update: []*nri.ContainerUpdate{limit("c", 4)}})
	b.sandboxd.Failures.Fail("UpdateContainerResources", making, making)
	must[string](t)(b.CreateContainer(t.Context(), containerRequest(sandbox)))
	if updates := b.sandboxd.Updates(); len(updates) != 1 || updates[0].GetNri().GetMemory().GetLimit().GetValue() != 4 {
		t.Errorf("updates done: %v", updates)
	}
}

// TestStopAndCreateAtTheSameTime: stops succeed whatever is created meanwhile.
func TestStopAndCreateAtTheSameTime(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	sandbox := must[string](t)(b.RunPodSandbox(t.Context(), sandboxRequest()))
	var tasks sync.WaitGroup
	for range 4 {
		tasks.Go(func() {
			if id, err := b.CreateContainer(t.Context(), containerRequest(sandbox)); err == nil {
				_ = b.StartContainer(t.Context(), id)
			}
		})
		tasks.Go(func() {
			if err := b.StopPodSandbox(t.Context(), sandbox); err != nil {
				t.Errorf("StopPodSandbox: %v", err)
			}
		})
	}
	tasks.Wait()
	ok(t, b.RemovePodSandbox(t.Context(), sandbox))
}
