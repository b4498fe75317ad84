package api

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// GetStatus lists the plugins in the order in which they are called.
func (s *Service) GetStatus(context.Context, *nriv1.GetStatusRequest) (*nriv1.GetStatusResponse, error) {
	state, _ := s.hub.State()
	resp := &nriv1.GetStatusResponse{Generation: state.Generation, Ready: state.Ready}
	for _, p := range s.hub.Plugins() {
		resp.Plugins = append(resp.Plugins, pluginStatus(p))
	}
	return resp, nil
}

func pluginStatus(p member.Status) *nriv1.PluginStatus {
	s := &nriv1.PluginStatus{
		Index:           p.Info.ID.Index,
		Name:            p.Info.ID.Name,
		NriVersion:      p.Info.NRIVersion,
		Events:          int32(p.Info.Events),
		Launched:        p.Info.Kind != plug.External,
		Active:          p.Active,
		Pid:             p.Info.PID,
		Calls:           p.Calls,
		Failures:        p.Failures,
		LastError:       p.LastError,
		State:           p.State,
		Kind:            string(p.Info.Kind),
		Uid:             p.Info.UID,
		Gid:             p.Info.GID,
		Executable:      p.Info.Executable,
		SinceUnixNano:   p.Since.UnixNano(),
		MeanLatencyNano: int64(p.Mean),
		MaxLatencyNano:  int64(p.Slowest),
		Queued:          uint32(p.Queued),
		Kept:            uint32(p.Kept),
		Overdue:         uint32(p.Overdue),
		Objects:         uint32(p.Objects),
		Rule:            describe(p.Rule),
	}
	if policy := p.Info.Policy; policy != nil {
		fail, keep := policy.GetFailRequest(), policy.GetKeepConnected()
		s.FailRequest, s.KeepConnected = &fail, &keep
	}
	return s
}

// describe says in lines for people what a rule is beyond the default.
func describe(r rule.Plugin) []string {
	if !r.Listed {
		return nil
	}
	var lines []string
	add := func(wanted bool, format string, args ...any) {
		if wanted {
			lines = append(lines, fmt.Sprintf(format, args...))
		}
	}
	add(r.Timeout > 0, "time limit %s", r.Timeout)
	for _, e := range slices.Sorted(maps.Keys(r.Timeouts)) {
		lines = append(lines, fmt.Sprintf("time limit of %s %s", e.PrettyName(), r.Timeouts[e]))
	}
	add(r.Synchronize > 0, "time limit of Synchronize %s", r.Synchronize)
	add(r.Parallel > 1, "%d requests in parallel", r.Parallel)
	add(r.Disconnect, "disconnected at a timeout")
	add(r.Observe, "observes only")
	add(!r.Pods.All(), "events of pods with %s", selection(r.Pods))
	add(r.Rights.Fields != nil, "may change [%s]", strings.Join(r.Rights.Fields, " "))
	add(!r.Rights.Pods.All(), "may change containers of pods with %s", selection(r.Rights.Pods))
	add(r.Rights.Strip, "what it may not change is taken out of its answers")
	add(len(r.Rights.UIDs) > 0, "users %v", r.Rights.UIDs)
	add(len(r.Rights.GIDs) > 0, "groups %v", r.Rights.GIDs)
	add(len(r.Rights.Executables) > 0, "programs %v", r.Rights.Executables)
	return append([]string{"entry " + r.Name}, lines...)
}

func selection(s rule.Selector) string {
	var parts []string
	if len(s.Namespaces) > 0 {
		parts = append(parts, fmt.Sprintf("namespaces %v", s.Namespaces))
	}
	if len(s.NotNamespaces) > 0 {
		parts = append(parts, fmt.Sprintf("not namespaces %v", s.NotNamespaces))
	}
	if len(s.Labels) > 0 {
		parts = append(parts, fmt.Sprintf("labels %v", s.Labels))
	}
	if len(s.Annotations) > 0 {
		parts = append(parts, fmt.Sprintf("annotations %v", s.Annotations))
	}
	return strings.Join(parts, ", ")
}
