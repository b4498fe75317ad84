package controller

import (
	"context"
	"fmt"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
)

const (
	waitRetryFirst = 100 * time.Millisecond
	waitRetryMost  = 2 * time.Second
	// killedGrace is how long a shim may take to tell itself how a container ended that was
	// killed without it.
	killedGrace = time.Second
)

// Wait blocks until a process has ended. For the first process of a container the death of the
// shim does not make it fail: the exit is then the one that the shim saved, or that the clean-up
// found out, else 137 or 255. Nobody saves the exits of execs; one that the shim did not tell
// before it died, or was killed without, may have been any: that is ErrUnavailable. Other errors:
// ErrNotFound, and the cause of ctx when that ends.
func (t *Tasks) Wait(ctx context.Context, sandboxID, containerID, execID string) (pod.Exit, error) {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return pod.Exit{}, err
	}
	for delay := waitRetryFirst; ; delay = min(2*delay, waitRetryMost) {
		e, again, err := t.waitOnce(ctx, i, containerID, execID)
		if !again {
			return e, named(containerID, execID, err)
		}
		// The shim is there but gave no answer to go by.
		if !pause.For(ctx, delay) {
			return pod.Exit{}, named(containerID, execID, context.Cause(ctx))
		}
	}
}

// waitOnce asks the shim, or what is left of it, once. A shim that does not answer is not
// waited for long once everything in the container was killed without it.
func (t *Tasks) waitOnce(ctx context.Context, i *shim.Instance, containerID, execID string) (e pod.Exit, again bool, err error) {
	asked, stop := context.WithCancel(ctx)
	defer stop()
	// Not by a goroutine that waits: there is one of these calls for each container.
	forget := i.WhenKilled(containerID, func() { time.AfterFunc(killedGrace, stop) })
	defer forget()
	e, again, err = t.ask(asked, i, containerID, execID)
	if err == nil || ctx.Err() != nil {
		return e, again, err
	}
	killed, ok := i.Killed(containerID)
	switch {
	case !ok:
		return e, again, err
	case execID != "":
		return pod.Exit{}, false, fmt.Errorf("its container was killed while the shim did not answer, how it ended is not known: %w", errdefs.ErrUnavailable)
	default:
		return killed, false, nil
	}
}

// ask waits for the answer of the shim, or of what is left of it.
func (t *Tasks) ask(ctx context.Context, i *shim.Instance, containerID, execID string) (e pod.Exit, again bool, err error) {
	if err := i.Settle(ctx); err != nil {
		return pod.Exit{}, false, err
	}
	if i.Status().Ended {
		e, err := exitOfDead(i, containerID, execID)
		return e, false, err
	}
	var resp taskapi.WaitResponse
	err = i.Task(ctx, "Wait", &taskapi.WaitRequest{ID: containerID, ExecID: execID}, &resp)
	switch {
	case err == nil:
		e := pod.Exit{
			Pid:  pidOf(i, containerID, execID),
			Code: resp.GetExitStatus(),
			At:   timeOf(resp.GetExitedAt()),
		}
		return e, false, nil
	case ctx.Err() != nil:
		return pod.Exit{}, false, context.Cause(ctx)
	case errdefs.IsNotFound(err) && execID == "":
		e, err := savedExit(i, containerID)
		return e, false, err
	case errdefs.IsNotFound(err):
		return pod.Exit{}, false, err
	default:
		return pod.Exit{}, true, err
	}
}

// savedExit is the exit of a container that its shim does not know any more.
func savedExit(i *shim.Instance, containerID string) (pod.Exit, error) {
	e, err := bundle.ReadExit(i.Bundle().ContainerDir(containerID))
	if err != nil {
		return pod.Exit{}, fmt.Errorf("%w: %w", errdefs.ErrNotFound, err)
	}
	return e, nil
}

// exitOfDead is the exit of a process whose shim is dead.
func exitOfDead(i *shim.Instance, containerID, execID string) (pod.Exit, error) {
	e, ok := i.Exit(containerID)
	switch {
	case !ok:
		return pod.Exit{}, errdefs.ErrNotFound
	case execID != "":
		return pod.Exit{}, fmt.Errorf("its shim died, how it ended is not known: %w", errdefs.ErrUnavailable)
	default:
		return e, nil
	}
}
