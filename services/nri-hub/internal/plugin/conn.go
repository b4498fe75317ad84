package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/fit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

var _ plug.Plugin = (*conn)(nil)

// conn is one connection to a plugin.
type conn struct {
	srv    *Server
	log    *slog.Logger
	mux    multiplex.Mux
	client *ttrpc.Client
	server *ttrpc.Server
	remote nri.PluginService
	done   chan struct{}
	ended  sync.Once

	info       plug.Info // complete once the plugin is configured
	registered chan error

	// mu guards all below.
	mu         sync.Mutex
	named      bool
	refused    error // of the registration; for good
	configured bool
	fallback   map[nri.Event]bool // events that the plugin knows only as StateChange
}

// connect puts the protocol on a connection. Nothing is read before mux.Unblock.
func (s *Server) connect(c net.Conn) (*conn, net.Listener, error) {
	p := &conn{
		srv:        s,
		log:        s.parts.Log,
		done:       make(chan struct{}),
		registered: make(chan error, 1),
		fallback:   make(map[nri.Event]bool),
	}
	p.mux = multiplex.Multiplex(newTrunk(c, max(s.cfg.RequestTimeout, minWriteLimit)), multiplex.WithBlockedRead())
	pc, err := p.mux.Open(multiplex.PluginServiceConn)
	if err != nil {
		return nil, nil, errors.Join(err, p.mux.Close())
	}
	l, err := p.mux.Listen(multiplex.RuntimeServiceConn)
	if err != nil {
		return nil, nil, errors.Join(err, p.mux.Close())
	}
	if p.server, err = ttrpc.NewServer(s.parts.ServerOptions...); err != nil {
		return nil, nil, errors.Join(err, p.mux.Close())
	}
	nri.RegisterRuntimeService(p.server, p)
	opts := append([]ttrpc.ClientOpts{ttrpc.WithOnClose(func() { p.Close(plug.ErrLost) })}, s.parts.ClientOptions...)
	p.client = ttrpc.NewClient(pc, opts...)
	p.remote = nri.NewPluginClient(p.client)
	return p, l, nil
}

// Info is complete after configuration.
func (p *conn) Info() plug.Info { return p.info }

// Done is closed when the connection is.
func (p *conn) Done() <-chan struct{} { return p.done }

// Close disconnects the plugin.
func (p *conn) Close(cause error) {
	p.ended.Do(func() {
		close(p.done)
		p.mu.Lock()
		id := p.info.ID
		p.mu.Unlock()
		// The context of whoever closes says nothing about the plugin.
		p.log.Info("plugin connection closed", slog.String("plugin", id.String()),
			slog.Int("pid", int(p.info.PID)), slog.Any("cause", cause))
		err := errors.Join(p.client.Close(), p.server.Close(), p.mux.Close())
		if err != nil {
			p.log.Debug("plugin connection did not close cleanly", slog.Any("error", err))
		}
	})
}

// Shutdown tells the plugin that it will be disconnected.
func (p *conn) Shutdown(ctx context.Context) error {
	return p.observe(ctx, "Shutdown", func(ctx context.Context) error {
		_, err := p.remote.Shutdown(ctx, &nri.Empty{})
		if status.Code(err) == grpccodes.Unimplemented {
			return nil
		}
		return err
	})
}

// Synchronize sends one part of the inventory.
func (p *conn) Synchronize(ctx context.Context, req *nri.SynchronizeRequest) (resp *nri.SynchronizeResponse, err error) {
	err = p.observe(ctx, "Synchronize", func(ctx context.Context) (err error) {
		resp, err = p.remote.Synchronize(ctx, req)
		return err
	})
	return resp, err
}

// Call sends the request that belongs to event. Notices that are too large for the
// transport are sent without the bulky parts of their objects.
func (p *conn) Call(ctx context.Context, event nri.Event, req proto.Message) (resp proto.Message, err error) {
	req = fit.Notice(req, fit.MaxMessage)
	err = p.observe(ctx, event.PrettyName(), func(ctx context.Context) (err error) {
		resp, err = p.send(ctx, event, req)
		return err
	})
	return resp, err
}

// observe makes the span and the metrics of a call, and sorts its error.
func (p *conn) observe(ctx context.Context, operation string, call func(context.Context) error) error {
	return p.srv.observe(ctx, p.info.ID, operation, sortError, call)
}

func (s *Server) observe(ctx context.Context, id plug.ID, operation string,
	sort func(context.Context, error) error, call func(context.Context) error,
) error {
	ctx, span := s.parts.Tracer.Start(ctx, "nri.plugin", trace.WithAttributes(
		attribute.String("plugin", id.String()), attribute.String("operation", operation)))
	defer span.End()
	begin := time.Now()
	err := sort(ctx, call(ctx))
	if deadline, ok := ctx.Deadline(); ok && time.Now().After(deadline) && err == nil {
		s.parts.Metrics.called(id, operation, begin, "late")
		span.SetAttributes(attribute.Bool("late", true))
		return nil
	}
	s.parts.Metrics.called(id, operation, begin, result(err))
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		span.SetAttributes(attribute.String("error.type", result(err)))
	}
	return err
}

// sortError makes of a call's error one that the hub can tell apart: plug.ErrLost, an error
// of the context, or the plugin's own answer without the trappings of the transport.
func sortError(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	st, answered := status.FromError(err)
	if !answered {
		return fmt.Errorf("%w: %w", plug.ErrLost, err)
	}
	// The plugin's own timer, which we have set, can be a little faster than ours.
	if deadline, ok := ctx.Deadline(); ok && st.Code() == grpccodes.DeadlineExceeded && time.Until(deadline) < deadlineSkew {
		return fmt.Errorf("plugin gave up: %w", context.DeadlineExceeded)
	}
	return errors.New(st.Message())
}

// minWriteLimit leaves a plugin on a busy node the time to take a part of a
// synchronisation, which is much larger than a request.
const minWriteLimit = 2 * time.Second

// deadlineSkew is by how much a plugin's answer may be ahead of our own timer.
const deadlineSkew = 50 * time.Millisecond
