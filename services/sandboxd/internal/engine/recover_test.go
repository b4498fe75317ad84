package engine_test

import (
	"log/slog"
	"testing"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace/noop"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
)

// A start that the end of the process cut off is not in the way of the next one.
func TestHalfStartedContainerCanBeStartedAfterARestart(t *testing.T) {
	for _, left := range []string{"created", onlyBundle} {
		t.Run(left, func(t *testing.T) {
			w := newWorld(t)
			n := start(t, w, "boot")
			n.session(t, "gw")
			id := createContainer(t, n, runPod(t, n, "a"), "c")
			n.close()
			w.procs[id] = &proc{state: left, done: make(chan struct{})}

			n = start(t, w, "boot")
			err := n.Tasks.Start(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			if got := state(t, n, id).GetState(); got != recordv1.ContainerState_CONTAINER_STATE_RUNNING {
				t.Errorf("state is %v", got)
			}
		})
	}
}

// Before the records are complete nothing is said to be unknown: a caller would take a
// running container for a removed one.
func TestIDsAreNotUnknownBeforeRecovery(t *testing.T) {
	n := engine.New(t.Context(), engine.Config{}, engine.Ports{}, slog.New(slog.DiscardHandler), noop.NewTracerProvider().Tracer(""))
	defer n.Close()
	_, sandboxErr := n.Views.SandboxID("a")
	_, containerErr := n.Views.ContainerID("a")
	for _, err := range []error{sandboxErr, containerErr, n.Sandboxes.Commit(t.Context(), "a"), n.Containers.Commit(t.Context(), "a", nil)} {
		if !errdefs.IsUnavailable(err) {
			t.Errorf("%v, want an unavailable error", err)
		}
	}
}
