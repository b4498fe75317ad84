package controller

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
)

// criuTime bounds the look at CRIU.
const criuTime = 30 * time.Second

// CheckpointReady says why the containers of a handler cannot be checkpointed or restored on
// this node. The shims that drive an OCI runtime need CRIU; what others need they say
// themselves when they are asked. Errors: ErrFailedPrecondition.
func (t *Tasks) CheckpointReady(ctx context.Context, handler pod.Handler) error {
	if !command.TakesRuncOptions(handler.RuntimeType) {
		return nil
	}
	path, err := exec.LookPath("criu")
	if err != nil {
		return fmt.Errorf("checkpoint and restore need criu, which is not in PATH: %w", errdefs.ErrFailedPrecondition)
	}
	ctx, cancel := context.WithTimeout(ctx, criuTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "check").CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s check: %w", path, context.Cause(ctx))
	}
	if _, exited := errors.AsType[*exec.ExitError](err); !exited {
		return fmt.Errorf("%s check: %w: %w", path, errdefs.ErrFailedPrecondition, err)
	}
	return fmt.Errorf("%s cannot work on this kernel, %q says: %s: %w", path, "criu check", lastLines(string(out)), errdefs.ErrFailedPrecondition)
}

// lastLines are the last three lines of a program's output in one.
func lastLines(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}
