package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
)

// errDeaf says that a shim does not answer at all.
var errDeaf = fmt.Errorf("shim does not answer: %w", errdefs.ErrUnavailable)

// Delete removes an ended process from its shim and, for a first process, its bundle and
// root mount, also when the shim is dead. A shim that does not answer at all is not waited for:
// the container is removed as that of a dead one is, and nothing else of the pod is touched. It
// fails with ErrNotFound if it is done already.
func (t *Tasks) Delete(ctx context.Context, sandboxID, containerID, execID string) (pod.Exit, error) {
	i, err := t.shims.Get(sandboxID)
	if err != nil {
		return pod.Exit{}, err
	}
	if err := i.Settle(ctx); err != nil {
		return pod.Exit{}, named(containerID, execID, err)
	}
	if execID == "" {
		done, err := i.TakeRemoval(ctx, containerID)
		if err != nil {
			return pod.Exit{}, named(containerID, "", err)
		}
		defer done()
		if err := i.EndRest(ctx, containerID); err != nil {
			return pod.Exit{}, named(containerID, "", err)
		}
	}
	e, err := t.askDelete(ctx, i, containerID, execID)
	if errdefs.IsUnavailable(err) && !errors.Is(err, errDeaf) {
		// The shim ended, or was told to, meanwhile: what it left is known once that is done.
		if err := i.Settle(ctx); err != nil {
			return pod.Exit{}, named(containerID, execID, err)
		}
		if !i.Status().Ended {
			e, err = t.askDelete(ctx, i, containerID, execID)
		}
	}
	switch {
	case err == nil:
		if execID == "" {
			err = i.RemoveContainer(containerID)
		}
		return e, named(containerID, execID, err)
	case execID != "" && i.Status().Ended:
		return pod.Exit{}, named(containerID, execID, errdefs.ErrNotFound)
	case execID == "" && (errdefs.IsNotFound(err) || errors.Is(err, errDeaf) || i.Status().Ended):
		// The shim has no such task, but a bundle may be left: of a deletion that was cut
		// off, or of a shim that is dead.
		return i.Discard(ctx, containerID)
	default:
		return pod.Exit{}, named(containerID, execID, err)
	}
}

// askDelete asks the shim to delete a process. A deletion may take long, as when a disk is slow,
// so what counts is whether the shim answers something else meanwhile: if not, errDeaf.
func (t *Tasks) askDelete(ctx context.Context, i *shim.Instance, containerID, execID string) (pod.Exit, error) {
	asked, stop := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop(nil)
	wg.Go(func() {
		for asked.Err() == nil {
			select {
			case <-time.After(killTimeout):
			case <-asked.Done():
				return
			}
			pinged, cancel := context.WithTimeout(asked, statusTimeout)
			err := t.ping(pinged, i)
			cancel()
			if errors.Is(err, context.DeadlineExceeded) {
				stop(errDeaf)
			}
		}
	})
	var resp taskapi.DeleteResponse
	err := i.Task(asked, "Delete", &taskapi.DeleteRequest{ID: containerID, ExecID: execID}, &resp)
	if err != nil {
		if ctx.Err() == nil && errors.Is(context.Cause(asked), errDeaf) {
			err = errDeaf
		}
		return pod.Exit{}, err
	}
	return pod.Exit{Pid: resp.GetPid(), Code: resp.GetExitStatus(), At: timeOf(resp.GetExitedAt())}, nil
}
