package hub

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"maps"
	"sync"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
)

// DryRunAnnotation marks the pod of a rehearsal, for plugins that care.
const DryRunAnnotation = "nri.crisp.dev/dry-run"

// Rehearsal is what the plugins would make of a container.
type Rehearsal struct {
	Response *nri.CreateContainerResponse // nil if the creation would fail
	Failure  error
	Records  []vet.Record // what each plugin wanted, in the order of the calls
}

// DryRun asks the plugins about a container that is never made, and then tells those that
// were asked that it is gone, so that they keep nothing for it. Nothing of what they
// answer is carried out or remembered. Plugins that are joining or degraded are left out.
func (h *Hub) DryRun(ctx context.Context, pod *nri.PodSandbox, container *nri.Container) (Rehearsal, error) {
	if pod == nil || container == nil {
		return Rehearsal{}, fmt.Errorf("a pod and a container are wanted: %w", errdefs.ErrInvalidArgument)
	}
	pod, container = proto.CloneOf(pod), proto.CloneOf(container)
	var err error
	// Ids of their own, so that no plugin takes the container for one that is there.
	if pod.Id, err = newID(); err != nil {
		return Rehearsal{}, err
	}
	if container.Id, err = newID(); err != nil {
		return Rehearsal{}, err
	}
	container.PodSandboxId = pod.GetId()
	pod.Annotations = maps.Clone(pod.GetAnnotations())
	if pod.Annotations == nil {
		pod.Annotations = make(map[string]string)
	}
	pod.Annotations[DryRunAnnotation] = "true"
	act := &dispatch.Rehearsal{}
	resp, failure := h.create(ctx, &nri.CreateContainerRequest{Pod: pod, Container: container}, act)
	h.undo(context.WithoutCancel(ctx), act, pod, container)
	if ctx.Err() != nil {
		return Rehearsal{}, context.Cause(ctx)
	}
	return Rehearsal{Response: resp, Failure: failure, Records: act.Records}, nil
}

// undo tells the plugins that were asked that the container has ended and is gone.
func (h *Hub) undo(ctx context.Context, act *dispatch.Rehearsal, pod *nri.PodSandbox, container *nri.Container) {
	ends := []struct {
		event nri.Event
		req   proto.Message
	}{
		{nri.Event_STOP_CONTAINER, &nri.StopContainerRequest{Pod: pod, Container: container}},
		{nri.Event_REMOVE_CONTAINER, &nri.RemoveContainerRequest{Pod: pod, Container: container}},
	}
	var wg sync.WaitGroup
	for _, m := range act.Asked {
		wg.Go(func() {
			t := m.Queue.Enter()
			defer t.Leave()
			if err := t.Wait(ctx, m.Plugin.Done(), m.Fails()); err != nil {
				return
			}
			for _, e := range ends {
				if _, _, err := h.caller.Call(ctx, m, e.event, e.req, 0, nil); err != nil {
					h.log.WarnContext(ctx, "plugin not told of the end of a dry run",
						slog.String("plugin", m.Info.ID.String()), slog.Any("error", err))
					return
				}
			}
		})
	}
	wg.Wait()
}

func newID() (string, error) {
	var b [32]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", fmt.Errorf("id: %w", err)
	}
	return hex.EncodeToString(b[:]), nil
}
