package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/containerd/errdefs"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	lanev1 "github.com/crisp-cri/crisp/proto/gen/crisp/lane/v1"
	"github.com/crisp-cri/crisp/services/internal/lane"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

// stopMargin is the time between the end of draining and the limit of the part.
const stopMargin = 5 * time.Second

// Server is a gRPC server with its health service.
type Server struct {
	cfg    ServerConfig
	tel    *telemetry.Telemetry
	grpc   *grpc.Server
	health *health.Server
	// draining is closed when the stop begins; streams end then.
	draining chan struct{}
}

// NewServer builds a server with the given services and the health service. It opens
// nothing: Part does. Registering a service twice panics, as in gRPC.
func NewServer(cfg ServerConfig, tel *telemetry.Telemetry, regs ...Registration) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("rpc server: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	opts := &serverOptions{checkPeers: true, floor: true}
	for _, r := range regs {
		r.register(opts)
	}
	metrics := telemetry.Register(tel, grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram()))
	s := &Server{cfg: cfg, tel: tel, health: health.NewServer(), draining: make(chan struct{})}
	s.grpc = grpc.NewServer(s.options(opts, metrics)...)
	if opts.lanes {
		lanes := lane.NewServer(tel, chain(s.around(opts, metrics)))
		for _, svc := range opts.services {
			lanes.Add(svc.desc, svc.impl)
		}
		lanev1.RegisterLaneServiceServer(s.grpc, lanes)
	}
	healthv1.RegisterHealthServer(s.grpc, s.health)
	for _, svc := range opts.services {
		s.grpc.RegisterService(svc.desc, svc.impl)
		s.health.SetServingStatus(svc.desc.ServiceName, healthv1.HealthCheckResponse_SERVING)
	}
	metrics.InitializeMetrics(s.grpc)
	return s, nil
}

// GRPC returns the server underneath, for what this package does not cover.
func (s *Server) GRPC() *grpc.Server { return s.grpc }

// Health returns the health service, to report the state of single services. The
// whole server (the empty name) is SERVING until the stop begins.
func (s *Server) Health() *health.Server { return s.health }

// Part listens on the configured socket and serves until it is stopped. At stop it
// answers NOT_SERVING, ends the streams, lets running calls finish within the drain
// timeout and then cuts them off.
func (s *Server) Part(name string) lifecycle.Part {
	return lifecycle.Part{
		Name:        name,
		StopTimeout: s.cfg.DrainTimeout.Std() + stopMargin,
		Run: func(ctx context.Context, ready func()) error {
			lis, err := unixsock.Listen(ctx, s.cfg.Socket)
			if err != nil {
				return err
			}
			s.tel.Log.InfoContext(ctx, "rpc listening", slog.String("part", name),
				slog.String("address", lis.Addr().String()))
			ready()
			return s.Serve(ctx, lis)
		},
	}
}

// Serve is Part for a listener that is open already. It closes the listener and may be
// called once.
func (s *Server) Serve(ctx context.Context, lis net.Listener) error {
	served := make(chan error, 1)
	go func() { served <- s.grpc.Serve(lis) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	s.health.Shutdown()
	close(s.draining)
	s.drain(ctx)
	if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}

func (s *Server) drain(ctx context.Context) {
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		s.grpc.GracefulStop()
	}()
	timer := time.NewTimer(s.cfg.DrainTimeout.Std())
	defer timer.Stop()
	select {
	case <-drained:
	case <-timer.C:
		s.tel.Log.WarnContext(ctx, "running calls cut off", slog.Duration("drain_timeout", s.cfg.DrainTimeout.Std()))
		s.grpc.Stop()
		<-drained
	}
}

// around is what is around a call on a lane. Who may open a lane was checked then.
func (s *Server) around(o *serverOptions, metrics *grpcprom.ServerMetrics) []grpc.UnaryServerInterceptor {
	list := s.outer(metrics)
	if o.floor {
		list = append(list, prepare(deadlineFloor).unary)
	}
	return append(list, mapUnary)
}

// outer are the interceptors that every unary call goes through first.
func (s *Server) outer(metrics *grpcprom.ServerMetrics) []grpc.UnaryServerInterceptor {
	return []grpc.UnaryServerInterceptor{
		selector.UnaryServerInterceptor(metrics.UnaryServerInterceptor(), notHealth()),
		selector.UnaryServerInterceptor(logging.UnaryServerInterceptor(logger(s.tel.Log), logOptions(levelOf)...), notHealth()),
		recovery.UnaryServerInterceptor(recoverOption(s.tel)),
	}
}

func (s *Server) options(o *serverOptions, metrics *grpcprom.ServerMetrics) []grpc.ServerOption {
	log, logOpts, rec := logger(s.tel.Log), logOptions(levelOf), recoverOption(s.tel)
	unary := s.outer(metrics)
	stream := []grpc.StreamServerInterceptor{
		selector.StreamServerInterceptor(metrics.StreamServerInterceptor(), notHealth()),
		selector.StreamServerInterceptor(logging.StreamServerInterceptor(log, logOpts...), notHealth()),
		recovery.StreamServerInterceptor(rec),
		s.endAtStop,
	}
	var steps []prepare
	if o.checkPeers {
		steps = append(steps, newPeerCheck(s.cfg).prepare)
	}
	if o.floor {
		steps = append(steps, deadlineFloor)
	}
	for _, p := range steps {
		unary, stream = append(unary, p.unary), append(stream, p.stream)
	}
	return []grpc.ServerOption{
		grpc.Creds(peerCredentials{}),
		grpc.MaxRecvMsgSize(s.cfg.MaxMessage.Int()),
		grpc.MaxSendMsgSize(s.cfg.MaxMessage.Int()),
		grpc.WaitForHandlers(true),
		grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithFilter(traced),
			otelgrpc.WithTracerProvider(s.tel.TracerProvider), otelgrpc.WithPropagators(s.tel.Propagator))),
		grpc.ChainUnaryInterceptor(append(unary, mapUnary)...),
		grpc.ChainStreamInterceptor(append(stream, mapStream)...),
	}
}

// endAtStop cancels a stream when the server begins to stop. A stream that follows
// something has no end of its own and would use up the whole drain timeout.
func (s *Server) endAtStop(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx, cancel := context.WithCancel(ss.Context())
	finished := make(chan struct{})
	watcher := make(chan struct{})
	go func() {
		defer close(watcher)
		select {
		case <-s.draining:
			cancel()
		case <-finished:
		}
	}()
	defer func() {
		close(finished)
		<-watcher
		cancel()
	}()
	err := next(srv, contextStream{ServerStream: ss, ctx: ctx})
	if err != nil && ctx.Err() != nil && ss.Context().Err() == nil {
		return status.Error(codes.Unavailable, "the server is stopping")
	}
	return err
}
