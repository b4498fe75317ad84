package app

import (
	"context"
	"encoding/json"

	"google.golang.org/protobuf/encoding/protojson"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/api/runtime"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/status"
	"github.com/crisp-cri/crisp/services/internal/buildinfo"
)

// self says what the gateway knows of itself and of its neighbours.
type self struct{ a *App }

var _ runtime.Self = self{}

// Able implements runtime.Self.
func (s self) Able(ctx context.Context) error {
	if s.a.hubs == nil {
		return nil
	}
	return s.a.hubNeeded(ctx)
}

// Plugins implements runtime.Self.
func (s self) Plugins(ctx context.Context) (enabled bool, degraded, missing []string, failure error) {
	if s.a.hubs == nil {
		return false, nil, nil, nil
	}
	degraded, missing = s.a.hubs.Plugins()
	return true, degraded, missing, s.a.hubs.Ready(ctx)
}

// Info implements runtime.Self. sandboxd speaks for itself.
func (s self) Info(ctx context.Context) map[string]any {
	return map[string]any{
		"cri-gateway": map[string]any{"version": buildinfo.Read().Version, "config": status.Config(*s.a.shown.Load())},
		"nri-hub":     s.hub(ctx),
		"eventbus":    s.bus(),
	}
}

func (s self) hub(ctx context.Context) any {
	if s.a.hubs == nil {
		return map[string]any{"enabled": false}
	}
	list, failure := s.a.hubs.Status(ctx)
	if len(list) == 1 {
		return hubStatus(list[0], failure)
	}
	info := make([]any, 0, len(list))
	for _, st := range list {
		info = append(info, hubStatus(st, failure))
	}
	return map[string]any{"enabled": true, "hubs": info}
}

// hubStatus is what a hub says of itself; st is nil if it is away, and failure says why.
func hubStatus(st *nriv1.GetStatusResponse, failure error) any {
	if st == nil {
		return map[string]any{"enabled": true, "connected": false, "error": failure.Error()}
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(st)
	if err != nil {
		return map[string]any{"enabled": true, "connected": true, "error": err.Error()}
	}
	return map[string]any{"enabled": true, "connected": true, "status": json.RawMessage(text)}
}

func (s self) bus() any {
	if s.a.events == nil {
		return map[string]any{"enabled": false}
	}
	return map[string]any{
		"enabled": true, "url": s.a.cfg.Events.URL, "connected": s.a.busConnected.Load(),
	}
}
