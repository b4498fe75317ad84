package backend

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/sequence"
)

// Hubs are the hubs of a node, over which its plugins are spread. The plugins of all of
// them are asked in one order, and what they want is merged as if they had one hub: the
// merge travels with the request. A hub that is away holds requests up as a single one
// does; after that its plugins are left out, unless one of them, or the configuration,
// says that requests fail then.
type Hubs struct{ hubs []*Hub }

var _ sequence.Hub = (*Hubs)(nil)

// NewHubs returns the hubs as one; there must be at least one.
func NewHubs(hubs ...*Hub) *Hubs { return &Hubs{hubs: hubs} }

// SetPolicy changes the policy of all hubs, like Hub.SetPolicy.
func (a *Hubs) SetPolicy(hold time.Duration, require bool) {
	for _, h := range a.hubs {
		h.SetPolicy(hold, require)
	}
}

// Required says whether calls fail while a hub is away.
func (a *Hubs) Required() bool { return a.hubs[0].Required() }

// Run keeps the standing streams up until ctx ends, like Hub.Run.
func (a *Hubs) Run(ctx context.Context, node nodev1.NodeServiceClient, executor Executor) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, h := range a.hubs {
		g.Go(func() error { return h.Run(ctx, node, executor) })
	}
	return g.Wait()
}

// Ready returns nil if every hub is connected and its plugins are back.
func (a *Hubs) Ready(ctx context.Context) error {
	errs := make([]error, 0, len(a.hubs))
	for _, h := range a.hubs {
		errs = append(errs, h.Ready(ctx))
	}
	return errors.Join(errs...)
}

// Status returns what each hub says of itself, nil for one that is away, whose error is
// among those joined.
func (a *Hubs) Status(ctx context.Context) ([]*nriv1.GetStatusResponse, error) {
	list := make([]*nriv1.GetStatusResponse, len(a.hubs))
	errs := make([]error, len(a.hubs))
	for i, h := range a.hubs {
		list[i], errs[i] = h.Status(ctx)
	}
	return list, errors.Join(errs...)
}

// Plugins names the plugins that do not answer, and those that are required and away.
func (a *Hubs) Plugins() (degraded, missing []string) {
	for _, h := range a.hubs {
		d, m := h.Plugins()
		degraded, missing = append(degraded, d...), append(missing, m...)
	}
	return degraded, missing
}

// Begin implements sequence.Hub.
func (a *Hubs) Begin(ctx context.Context) (_ context.Context, end func()) {
	ends := make([]func(), len(a.hubs))
	for i, h := range a.hubs {
		ctx, ends[i] = h.Begin(ctx) //nolint:fatcontext // one value for each hub
	}
	return ctx, func() {
		for _, end := range ends {
			end()
		}
	}
}

// Wants implements sequence.Hub.
func (a *Hubs) Wants(ctx context.Context, events ...nri.Event) (bool, error) {
	wanted := false
	for _, h := range a.hubs {
		w, err := h.Wants(ctx, events...)
		if err != nil {
			return false, err
		}
		wanted = wanted || w
	}
	return wanted, nil
}

// each takes a request along the parts of all hubs and returns what came of it. one is
// the whole request if there is one hub, which needs no merge.
func (a *Hubs) each(ctx context.Context, one func(ctx context.Context, h *Hub) error, events ...nri.Event) (*nriv1.Merge, error) {
	if len(a.hubs) == 1 {
		return nil, one(ctx, a.hubs[0])
	}
	for _, h := range a.hubs {
		// What a hub that is away has of plugins is known after it was waited for.
		if _, _, err := h.await(ctx); err != nil {
			return nil, err
		}
	}
	var merge *nriv1.Merge
	for _, p := range divide(a.hubs, events) {
		if err := p.hub.absent(p, events); err != nil {
			return nil, err
		}
		l := &leg{after: p.after, last: p.last, merge: merge}
		if err := one(withLeg(ctx, l), p.hub); err != nil {
			return nil, err
		}
		merge = l.merge
	}
	return merge, nil
}

// absent is the error of a request for plugins of a hub that is away, if one of them says
// that requests fail then. Events that only tell something never fail.
func (h *Hub) absent(p part, events []nri.Event) error {
	st, _ := h.state.get()
	if st.connected || !vetoable(events[0]) {
		return nil
	}
	for _, ref := range st.plugins {
		if ref.GetFailRequest() && listensToOne(ref, events[:1]) && p.has(ref.GetName()) {
			return fmt.Errorf("nri-hub of plugin %q is away, and the plugin's policy is to fail the request: %w", ref.GetName(), errdefs.ErrUnavailable)
		}
	}
	return nil
}

func vetoable(e nri.Event) bool {
	switch e {
	case nri.Event_RUN_POD_SANDBOX, nri.Event_CREATE_CONTAINER, nri.Event_START_CONTAINER,
		nri.Event_UPDATE_CONTAINER, nri.Event_UPDATE_POD_SANDBOX:
		return true
	default:
		return false
	}
}

// conclude has each hub check what all of them have made of a request.
func (a *Hubs) conclude(ctx context.Context, pod *nri.PodSandbox, container *nri.Container, merge *nriv1.Merge, events ...nri.Event) error {
	if len(a.hubs) == 1 {
		return nil
	}
	for _, h := range a.hubs {
		err := h.call(ctx, pod, func(ctx context.Context, generation uint64) error {
			_, err := h.client.Conclude(ctx, &nriv1.ConcludeRequest{Generation: generation, Pod: pod, Container: container, Merge: merge})
			return err
		}, events...)
		if err != nil {
			return err
		}
	}
	return nil
}

// Notify implements sequence.Hub.
func (a *Hubs) Notify(ctx context.Context, event nri.Event, pod *nri.PodSandbox, container *nri.Container) error {
	if event == nri.Event_RUN_POD_SANDBOX {
		if err := a.awaitRequired(ctx, pod, ""); err != nil {
			return err
		}
	}
	merge, err := a.each(ctx, func(ctx context.Context, h *Hub) error { return h.Notify(ctx, event, pod, container) }, heard(event)...)
	if err != nil || event != nri.Event_RUN_POD_SANDBOX {
		return err
	}
	return a.conclude(ctx, pod, nil, merge, event)
}

// heard are the events that an event can be for a plugin.
func heard(event nri.Event) []nri.Event {
	switch event {
	case nri.Event_REMOVE_CONTAINER:
		return []nri.Event{event, nri.Event_STOP_CONTAINER}
	case nri.Event_REMOVE_POD_SANDBOX:
		return []nri.Event{event, nri.Event_STOP_POD_SANDBOX}
	default:
		return []nri.Event{event}
	}
}

// UpdatePodSandbox implements sequence.Hub.
func (a *Hubs) UpdatePodSandbox(ctx context.Context, req *nri.UpdatePodSandboxRequest) error {
	_, err := a.each(ctx, func(ctx context.Context, h *Hub) error { return h.UpdatePodSandbox(ctx, req) }, nri.Event_UPDATE_POD_SANDBOX)
	return err
}

// CreateContainer implements sequence.Hub.
func (a *Hubs) CreateContainer(ctx context.Context, req *nri.CreateContainerRequest) (*nri.CreateContainerResponse, error) {
	if err := a.awaitRequired(ctx, req.GetPod(), req.GetContainer().GetName()); err != nil {
		return nil, err
	}
	var answer *nri.CreateContainerResponse
	merge, err := a.each(ctx, func(ctx context.Context, h *Hub) error {
		resp, err := h.CreateContainer(ctx, req)
		if resp != nil {
			answer = resp
		}
		return err
	}, nri.Event_CREATE_CONTAINER)
	if err != nil {
		return nil, err
	}
	return answer, a.conclude(ctx, req.GetPod(), req.GetContainer(), merge,
		nri.Event_CREATE_CONTAINER, nri.Event_VALIDATE_CONTAINER_ADJUSTMENT)
}

// UpdateContainer implements sequence.Hub.
func (a *Hubs) UpdateContainer(ctx context.Context, req *nri.UpdateContainerRequest) (*nri.UpdateContainerResponse, error) {
	var answer *nri.UpdateContainerResponse
	_, err := a.each(ctx, func(ctx context.Context, h *Hub) error {
		resp, err := h.UpdateContainer(ctx, req)
		if resp != nil {
			answer = resp
		}
		return err
	}, nri.Event_UPDATE_CONTAINER)
	return answer, err
}

// StopContainer implements sequence.Hub.
func (a *Hubs) StopContainer(ctx context.Context, req *nri.StopContainerRequest) (*nri.StopContainerResponse, error) {
	var answer *nri.StopContainerResponse
	_, err := a.each(ctx, func(ctx context.Context, h *Hub) error {
		resp, err := h.StopContainer(ctx, req)
		if resp != nil {
			answer = resp
		}
		return err
	}, nri.Event_STOP_CONTAINER)
	return answer, err
}
