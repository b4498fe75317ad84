package backend

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/operation"
)

// awaitRequired waits a bounded time until every plugin that one of several hubs requires for
// a pod, or for one of its containers, answers at some hub. One hub waits by itself.
// FailedPrecondition names a plugin that does not come.
func (a *Hubs) awaitRequired(ctx context.Context, pod *nri.PodSandbox, container string) error {
	if len(a.hubs) == 1 {
		return nil
	}
	names, wait, err := a.required(ctx, pod, container)
	if err != nil || len(names) == 0 {
		return err
	}
	if deadline, ok := operation.CallerDeadline(ctx); ok {
		wait = min(wait, time.Until(deadline)/2) // the rest is for the plugins themselves
	}
	end := time.Now().Add(wait)
	for {
		missing, changed := a.unready(names)
		left := time.Until(end)
		switch {
		case missing == "":
			return nil
		case left <= 0:
			return fmt.Errorf("waited %s: required plugin %q did not take part: %w", wait, missing, errdefs.ErrFailedPrecondition)
		}
		if err := anyChange(ctx, changed, left); err != nil {
			return fmt.Errorf("required plugin %q did not take part: %w: %w", missing, errdefs.ErrFailedPrecondition, err)
		}
	}
}

// required asks the hubs which plugins the pod or container needs, and for how long to wait
// at most. A hub whose rules cannot concern the pod is not asked.
func (a *Hubs) required(ctx context.Context, pod *nri.PodSandbox, container string) (names []string, wait time.Duration, err error) {
	for _, h := range a.hubs {
		if st, _ := h.state.get(); !st.guardsPod(pod) {
			continue
		}
		err := h.call(ctx, pod, func(ctx context.Context, generation uint64) error {
			resp, err := h.client.RequiredPlugins(ctx, &nriv1.RequiredPluginsRequest{Generation: generation, Pod: pod, ContainerName: container})
			if errdefs.IsNotImplemented(err) {
				return nil // an older hub; what is missing is found at the end
			}
			names = append(names, resp.GetNames()...)
			wait = max(wait, time.Duration(resp.GetWaitMs())*time.Millisecond)
			return err
		}, nri.Event_RUN_POD_SANDBOX, nri.Event_CREATE_CONTAINER)
		if err != nil {
			return nil, 0, err
		}
	}
	return names, wait, nil
}

// unready is the first of the named plugins that answers at no hub, and the channels of which
// one is closed when that may have changed.
func (a *Hubs) unready(names []string) (missing string, changed []<-chan struct{}) {
	var there []string
	for _, h := range a.hubs {
		st, next := h.state.get()
		changed = append(changed, next)
		if !st.usable() {
			continue
		}
		for _, p := range st.plugins {
			if !slices.Contains(st.degraded, p.GetName()) {
				there = append(there, p.GetName())
			}
		}
	}
	for _, name := range names {
		matches := func(full string) bool {
			_, short, _ := strings.Cut(full, "-")
			return name == full || name == short
		}
		if !slices.ContainsFunc(there, matches) {
			return name, changed
		}
	}
	return "", changed
}

// anyChange waits until one of the channels is closed, at most d. The error is the cause of
// ctx's end.
func anyChange(ctx context.Context, changed []<-chan struct{}, d time.Duration) error {
	over := make(chan struct{})
	defer close(over)
	one := make(chan struct{}, len(changed))
	for _, c := range changed {
		go func() {
			select {
			case <-c:
				one <- struct{}{}
			case <-over:
			}
		}()
	}
	return waitChange(ctx, one, d)
}
