package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
)

// legOf is nil for a request that is whole.
func legOf(l *nriv1.Leg) *dispatch.Leg {
	if l == nil {
		return nil
	}
	leg := legWith(l.GetMerge())
	leg.After, leg.Last = l.GetAfter(), l.GetLast()
	return &leg
}

func legWith(m *nriv1.Merge) dispatch.Leg {
	return dispatch.Leg{Consulted: m.GetConsulted(), State: adjust.State{
		Container: m.GetContainer(), Adjust: m.GetAdjust(), Owners: m.GetOwners(),
		Updates: m.GetUpdates(), Evictions: m.GetEvictions(), Update: m.GetUpdate(),
	}}
}

func mergeOf(l *dispatch.Leg) *nriv1.Merge {
	if l == nil {
		return nil
	}
	s := l.State
	return &nriv1.Merge{
		Container: s.Container, Adjust: s.Adjust, Owners: s.Owners, Updates: s.Updates,
		Evictions: s.Evictions, Update: s.Update, Consulted: l.Consulted,
	}
}

// RequiredPlugins names the plugins that must take part in the making of a pod or container.
func (s *Service) RequiredPlugins(_ context.Context, req *nriv1.RequiredPluginsRequest) (*nriv1.RequiredPluginsResponse, error) {
	if err := s.checkPod(req.GetGeneration(), req); err != nil {
		return nil, err
	}
	names, wait, err := s.hub.Requires(req.GetPod(), req.GetContainerName())
	if err != nil {
		return nil, err
	}
	return &nriv1.RequiredPluginsResponse{Names: names, WaitMs: wait.Milliseconds()}, nil
}

// Conclude checks what the plugins of several hubs have made of a request.
func (s *Service) Conclude(ctx context.Context, req *nriv1.ConcludeRequest) (*nriv1.ConcludeResponse, error) {
	if err := s.checkPod(req.GetGeneration(), req); err != nil {
		return nil, err
	}
	if err := s.hub.Conclude(ctx, req.GetPod(), req.GetContainer(), legWith(req.GetMerge())); err != nil {
		return nil, err
	}
	return &nriv1.ConcludeResponse{}, nil
}

// roster are the plugins that get events, in the order of calls.
func (s *Service) roster() []*nriv1.PluginRef {
	var refs []*nriv1.PluginRef
	for _, p := range s.hub.Plugins() {
		if p.Active || p.State == "degraded" {
			refs = append(refs, &nriv1.PluginRef{
				Name: p.Info.ID.String(), Events: int32(p.Info.Events), FailRequest: p.Info.Policy.GetFailRequest(),
			})
		}
	}
	return refs
}
