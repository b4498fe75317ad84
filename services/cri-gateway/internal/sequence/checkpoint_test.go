package sequence_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/backendtest"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func restoreRequest() *criv1.RestorePodRequest {
	container := func(name string) *criv1.ContainerConfig {
		return &criv1.ContainerConfig{Metadata: &criv1.ContainerMetadata{Name: name}, Image: &criv1.ImageSpec{Image: "i"}}
	}
	return &criv1.RestorePodRequest{
		CheckpointPath: "/c", Config: sandboxRequest().GetConfig(),
		ContainerConfigs: []*criv1.ContainerConfig{container("one"), container("two")},
	}
}

func TestRestoredPodIsMadeWithItsPlugins(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	resp := must[*criv1.RestorePodResponse](t)(b.RestorePod(t.Context(), restoreRequest(), time.Minute))
	b.expect(t, "CheckRestore", "PrepareSandbox", "hub.RunPodSandbox", "CommitSandbox",
		"PrepareContainer /c", "hub.CreateContainer", "CommitContainer", "hub.PostCreateContainer",
		"PrepareContainer /c", "hub.CreateContainer", "CommitContainer", "hub.PostCreateContainer")
	got := resp.GetRestoredContainers()
	if resp.GetPodSandboxId() == "" || len(got) != 2 || got[0].GetName() != "one" || got[1].GetName() != "two" ||
		got[0].GetContainerId() == "" || got[0].GetContainerId() == got[1].GetContainerId() {
		t.Errorf("answer: %v", resp)
	}
	if _, err := b.RestorePod(t.Context(), restoreRequest(), time.Minute); !errdefs.IsAlreadyExists(err) {
		t.Errorf("again: %v, want AlreadyExists", err)
	}
	b.expect(t, "CheckRestore", "PrepareSandbox")
}

func TestFailedRestoreIsUndone(t *testing.T) {
	b := newBench(t, backendtest.AllEvents())
	b.sandboxd.Failures.Fail("CheckRestore", errdefs.ErrFailedPrecondition)
	if _, err := b.RestorePod(t.Context(), restoreRequest(), time.Minute); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("not a checkpoint: %v", err)
	}
	b.expect(t, "CheckRestore")

	b.sandboxd.Failures.Fail("CommitContainer", nil, errdefs.ErrFailedPrecondition)
	if _, err := b.RestorePod(t.Context(), restoreRequest(), time.Minute); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("container: %v", err)
	}
	b.expect(t, "CheckRestore", "PrepareSandbox", "hub.RunPodSandbox", "CommitSandbox",
		"PrepareContainer /c", "hub.CreateContainer", "CommitContainer", "hub.PostCreateContainer",
		"PrepareContainer /c", "hub.CreateContainer", "CommitContainer",
		"hub.StopContainer", "hub.RemoveContainer", "AbortContainer",
		"QuiesceSandbox", "hub.StopContainer", "hub.StopPodSandbox", "StopSandbox",
		"RemoveSandbox", "hub.RemoveContainer", "hub.RemovePodSandbox")
}

// What nobody waits for any more must not stay: its caller takes it for failed.
func TestRestoreWithoutACallerIsUndone(t *testing.T) {
	b := newBench(t, 0)
	release := b.sandboxd.Failures.Block("CommitContainer")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := b.RestorePod(ctx, restoreRequest(), time.Minute)
		done <- err
	}()
	b.await(t, "PrepareContainer /c")
	cancel()
	if err := <-done; err == nil {
		t.Error("no error")
	}
	release()
	b.await(t, "RemoveSandbox")
}

// await waits until a call was made.
func (b *bench) await(t *testing.T, call string) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		if !slices.Contains(b.journal.Take(), call) {
			return fmt.Errorf("%s was not called", call)
		}
		return nil
	})
}
