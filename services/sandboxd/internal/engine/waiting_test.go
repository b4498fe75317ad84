package engine_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
)

// A process that was made and waits is seen, and has the limits that are set meanwhile; the start
// goes on with it.
func TestProcessThatWaitsForItsStart(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	id := createContainer(t, n, runPod(t, n, "a"), "c")
	for range 2 {
		if err := n.Tasks.Create(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	v, err := n.Views.Describe(id)
	if err != nil || v.Container.GetPid() != 42 || state(t, n, id).GetState() != table.ContainerCreated {
		t.Errorf("%v, %v", v.Container, err)
	}
	if _, err := n.Containers.Update(t.Context(), id, memory(7), nil, nil); err != nil || n.w.limits[id] != 7 {
		t.Errorf("update: %v, limit %d", err, n.w.limits[id])
	}
	if err := n.Tasks.Start(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if rec := state(t, n, id); rec.GetState() != table.ContainerRunning || rec.GetPid() != 42 || n.w.called("tasks.create") != 1 {
		t.Errorf("record %v after %d creations", rec, n.w.called("tasks.create"))
	}
	if err := n.Tasks.Create(t.Context(), id); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("of a running container: %v", err)
	}
}

// Whatever happens instead of the start, no process is left; only a refusal is an end.
func TestProcessThatWaitsAndIsNotStarted(t *testing.T) {
	for name, tt := range map[string]struct {
		instead func(ctx context.Context, n *node, sandbox, id string) error
		ended   bool
	}{
		"refusal": {func(ctx context.Context, n *node, _, id string) error {
			return n.Tasks.Refuse(ctx, id, errors.New("no way"))
		}, true},
		"stop": {func(ctx context.Context, n *node, _, id string) error {
			_, err := n.Containers.Stop(ctx, id, 0)
			return err
		}, false},
		"stop of pod": {func(ctx context.Context, n *node, sandbox, _ string) error { return n.Sandboxes.Stop(ctx, sandbox) }, false},
		"removal": {func(ctx context.Context, n *node, _, id string) error {
			_, err := n.Containers.Remove(ctx, id)
			return err
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			n := start(t, newWorld(t), "boot")
			n.session(t, "gw")
			sandbox := runPod(t, n, "a")
			id := createContainer(t, n, sandbox, "c")
			if err := n.Tasks.Create(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if err := tt.instead(t.Context(), n, sandbox, id); err != nil {
				t.Fatal(err)
			}
			if p, err := n.w.proc(id); !errdefs.IsNotFound(err) {
				t.Errorf("a process is left: %v, %v", p, err)
			}
			if io := "io " + id; slices.Contains(n.w.held(), io) {
				t.Error("its streams are open")
			}
			switch {
			case name == "removal":
			case tt.ended:
				if rec := state(t, n, id); rec.GetExitCode() != 128 || !strings.Contains(rec.GetMessage(), "no way") {
					t.Errorf("record %v", rec)
				}
			case name == "stop":
				if err := n.Tasks.Start(t.Context(), id); err != nil {
					t.Errorf("start after it: %v", err)
				}
			default:
				if s := state(t, n, id).GetState(); s != table.ContainerCreated {
					t.Errorf("state %v", s)
				}
			}
		})
	}
}
