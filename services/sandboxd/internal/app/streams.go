package app

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/containerio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/client"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
)

// streams is the IO of all containers: a shim that writes the log itself is asked for what
// concerns its containers, the FIFOs of every other one are read here. Which one a container
// has is decided by what its pod's bundle says of the shim, not by the configuration, which
// may have changed since. Execs have FIFOs with each shim.
type streams struct {
	*containerio.IO // FIFOs

	shims *shim.Manager
	logs  *client.IO
}

var _ port.IO = streams{}

func newStreams(shims *shim.Manager, fifos *containerio.IO, maxLine int) streams {
	s := streams{IO: fifos, shims: shims}
	s.logs = client.New(client.Config{MaxLineSize: maxLine, Bundle: s.bundle, Execs: fifos})
	return s
}

// holder finds the shim that holds a container; nil if there is none.
func (s streams) holder(containerID string) *shim.Instance {
	for _, i := range s.shims.All() {
		if i.Bundle().HasContainer(containerID) {
			return i
		}
	}
	return nil
}

// bundle finds the bundle of a container's pod.
func (s streams) bundle(containerID string) (string, error) {
	i := s.holder(containerID)
	if i == nil {
		return "", fmt.Errorf("task of container %q: %w", containerID, errdefs.ErrNotFound)
	}
	return i.Bundle().Dir(), nil
}

// of returns the IO that a container's task has.
func (s streams) of(containerID string) port.IO {
	if i := s.holder(containerID); i != nil && writesLogs(i) {
		return s.logs
	}
	return s.IO
}

func writesLogs(i *shim.Instance) bool { return i.Meta().RuntimeType == client.RuntimeType }

// Open connects the streams of a container whose task may not exist yet.
func (s streams) Open(ctx context.Context, containerID string, spec port.IOSpec) (pod.Stdio, error) {
	if i, err := s.shims.Get(spec.SandboxID); err == nil && writesLogs(i) {
		return s.logs.Open(ctx, containerID, spec)
	}
	return s.IO.Open(ctx, containerID, spec)
}

// ReopenLog opens the log file anew.
func (s streams) ReopenLog(ctx context.Context, containerID string) error {
	return s.of(containerID).ReopenLog(ctx, containerID)
}

// Attach connects a client.
func (s streams) Attach(ctx context.Context, containerID string, to pod.Streams) error {
	return s.of(containerID).Attach(ctx, containerID, to)
}

// Drain waits for the last output.
func (s streams) Drain(ctx context.Context, containerID string) error {
	return s.of(containerID).Drain(ctx, containerID)
}

// stop ends the pumps and waits, bounded by ctx, for the inputs of clients, whose connections
// must have been ended before.
func (s streams) stop(ctx context.Context) error {
	err := s.Stop(ctx)
	ended := make(chan struct{})
	go func() {
		s.logs.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return err
	case <-ctx.Done():
		return errors.Join(err, fmt.Errorf("inputs of attached clients: %w", context.Cause(ctx)))
	}
}
