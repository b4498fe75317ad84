package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// maxName bounds what a plugin says of itself, in bytes. Drivers are called by DNS names.
const maxName = 253

// RegisterPlugin is the plugin's first call. A refusal is its error, never a connection
// that is dropped afterwards.
func (p *conn) RegisterPlugin(ctx context.Context, req *nri.RegisterPluginRequest) (*nri.Empty, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.named {
		return nil, fmt.Errorf("plugin %q is registered already: %w", p.info.ID, errdefs.ErrAlreadyExists)
	}
	if p.refused != nil {
		// The connection is about to be closed; a success now would leave its plugin waiting
		// for Configure.
		return nil, p.refused
	}
	err := p.identify(req)
	if err == nil && p.srv.refuses() {
		err = fmt.Errorf("hub is stopping: %w", errdefs.ErrUnavailable)
	}
	if err != nil {
		p.refused = err
		p.registered <- err
		return nil, err
	}
	p.named = true
	p.log.InfoContext(ctx, "plugin registered", slog.String("plugin", p.info.ID.String()),
		slog.String("nri_version", req.GetNRIVersion()), slog.Int("pid", int(p.info.PID)), slog.String("kind", string(p.info.Kind)))
	p.registered <- nil
	return &nri.Empty{}, nil
}

// identify takes the plugin's name. What the hub has launched is named by its file.
func (p *conn) identify(req *nri.RegisterPluginRequest) error {
	// Both are shown, logged and remembered wherever the plugin is.
	for field, v := range map[string]string{"plugin_name": req.GetPluginName(), "plugin_idx": req.GetPluginIdx(), "NRI_version": req.GetNRIVersion()} {
		if len(v) > maxName {
			return fmt.Errorf("invalid plugin: %s: %d bytes are too many, at most %d: %w", field, len(v), maxName, errdefs.ErrInvalidArgument)
		}
	}
	p.info.NRIVersion = req.GetNRIVersion()
	if p.info.Kind == plug.Launched {
		return p.srv.parts.Host.Admit(p.info)
	}
	if err := nri.CheckPluginName(req.GetPluginName()); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if err := nri.CheckPluginIndex(req.GetPluginIdx()); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	p.info.ID = plug.ID{Index: req.GetPluginIdx(), Name: req.GetPluginName()}
	return p.srv.parts.Host.Admit(p.info)
}

// UpdateContainers passes on what the plugin wants of its own accord.
func (p *conn) UpdateContainers(ctx context.Context, req *nri.UpdateContainersRequest) (*nri.UpdateContainersResponse, error) {
	p.mu.Lock()
	configured := p.configured
	p.mu.Unlock()
	if !configured {
		return nil, fmt.Errorf("update of containers by a plugin that is not registered and configured: %w", errdefs.ErrFailedPrecondition)
	}
	failed, err := p.srv.parts.Host.Update(ctx, p.info.ID, req.GetUpdate(), req.GetEvict())
	if err != nil {
		return nil, err
	}
	return &nri.UpdateContainersResponse{Failed: failed}, nil
}

// configure makes the plugin's first call in the other direction and completes Info.
func (p *conn) configure(ctx context.Context, config string) error {
	req := p.srv.configureRequest(p.info.ID, config)
	var resp *nri.ConfigureResponse
	err := p.observe(ctx, "Configure", func(ctx context.Context) (err error) {
		resp, err = p.remote.Configure(ctx, req)
		return err
	})
	if err != nil {
		return fmt.Errorf("configure plugin %q: %w", p.info.ID, err)
	}
	p.info.Events, p.info.Policy = p.srv.subscription(ctx, p.info.ID, resp)
	p.mu.Lock()
	p.configured = true
	p.mu.Unlock()
	return nil
}

func (s *Server) configureRequest(id plug.ID, config string) *nri.ConfigureRequest {
	name, version := s.parts.Host.Runtime()
	return &nri.ConfigureRequest{
		Config:              config,
		RuntimeName:         name,
		RuntimeVersion:      version,
		RegistrationTimeout: s.cfg.AnnouncedTimeout.Milliseconds(),
		RequestTimeout:      s.parts.Host.RequestTimeout(id).Milliseconds(),
		NRIVersion:          s.cfg.NRIVersion,
	}
}

// subscription is what a plugin wants to hear of, and its failure policy.
func (s *Server) subscription(ctx context.Context, id plug.ID, resp *nri.ConfigureResponse) (nri.EventMask, *nri.FailurePolicy) {
	events := nri.EventMask(resp.GetEvents())
	if unknown := events &^ nri.ValidEvents; unknown != 0 {
		s.parts.Log.WarnContext(ctx, "plugin subscribes to events that this NRI version does not have; they are left out",
			slog.String("plugin", id.String()), slog.Int64("mask", int64(unknown)))
	}
	if events == 0 {
		events = nri.ValidEvents
	}
	return events & nri.ValidEvents, resp.GetFailurePolicy()
}

// awaitRegistration returns when the plugin has registered, or why it will not.
func (p *conn) awaitRegistration(ctx context.Context, limit time.Duration) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-p.registered:
		return err
	case <-timer.C:
		return p.cancelRegistration(fmt.Errorf("no registration within %s: %w", limit, context.DeadlineExceeded))
	case <-p.done:
		return plug.ErrLost
	case <-ctx.Done():
		return p.cancelRegistration(context.Cause(ctx))
	}
}

// cancelRegistration refuses a registration that has not come yet; one that was just
// answered counts, because its plugin now waits for Configure.
func (p *conn) cancelRegistration(cause error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.named {
		return nil
	}
	if p.refused != nil {
		return p.refused
	}
	p.refused = cause
	return cause
}
