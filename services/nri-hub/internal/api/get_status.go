package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// GetStatus lists the plugins in the order in which they are called.
func (s *Service) GetStatus(context.Context, *nriv1.GetStatusRequest) (*nriv1.GetStatusResponse, error) {
	state, _ := s.hub.State()
	resp := &nriv1.GetStatusResponse{Generation: state.Generation, Ready: state.Ready}
	for _, p := range s.hub.Plugins() {
		resp.Plugins = append(resp.Plugins, &nriv1.PluginStatus{
			Index:      p.Info.ID.Index,
			Name:       p.Info.ID.Name,
			NriVersion: p.Info.NRIVersion,
			Events:     int32(p.Info.Events),
			Launched:   p.Info.Launched,
			Active:     p.Active,
			Pid:        p.Info.PID,
			Calls:      p.Calls,
			Failures:   p.Failures,
			LastError:  p.LastError,
		})
	}
	return resp, nil
}
