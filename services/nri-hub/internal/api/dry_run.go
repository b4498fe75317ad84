package api

import (
	"context"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
)

// DryRun asks the plugins about a container that is never made.
func (s *Service) DryRun(ctx context.Context, req *nriv1.DryRunRequest) (*nriv1.DryRunResponse, error) {
	r, err := s.hub.DryRun(ctx, req.GetPod(), req.GetContainer())
	if err != nil {
		return nil, err
	}
	resp := &nriv1.DryRunResponse{Response: r.Response}
	if r.Failure != nil {
		resp.Failure = r.Failure.Error()
	}
	for _, rec := range r.Records {
		resp.Changes = append(resp.Changes, changes(rec)...)
	}
	return resp, nil
}

// changes are the changes of a record; a failed call is one without a field.
func changes(rec vet.Record) []*nriv1.PluginChange {
	if rec.Error != "" {
		return []*nriv1.PluginChange{{
			Plugin: rec.Plugin.String(), ContainerId: rec.Container.GetId(), Refused: rec.Error, LatencyNano: int64(rec.Latency),
		}}
	}
	list := make([]*nriv1.PluginChange, 0, len(rec.Changes))
	for _, c := range rec.Changes {
		list = append(list, &nriv1.PluginChange{
			Plugin:      rec.Plugin.String(),
			ContainerId: rec.Container.GetId(),
			Field:       c.Field,
			Key:         c.Key,
			OldValue:    c.Old,
			NewValue:    c.New,
			Removed:     c.Removed,
			Refused:     rec.Refused,
			LatencyNano: int64(rec.Latency),
		})
	}
	return list
}
