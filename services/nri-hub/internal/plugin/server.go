package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel/trace"

	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// maxUnregistered bounds the connections that have not said who they are.
const maxUnregistered = 256

// refusalGrace is how long a refused plugin has to take its answer and leave.
const refusalGrace = time.Second

// Config are the limits of connections.
type Config struct {
	// RegistrationTimeout is for the plugin's first call after it has connected.
	RegistrationTimeout time.Duration
	// AnnouncedTimeout is what plugins are told about the time they have for registering
	// again. It is generous, so that they survive a restart of the hub.
	AnnouncedTimeout time.Duration
	// RequestTimeout is what plugins are told, and bounds Configure and each write.
	RequestTimeout time.Duration
	// NRIVersion is what plugins are told.
	NRIVersion string
}

// Host is who plugins are for.
type Host interface {
	// Serve keeps the plugin until it is disconnected or ctx ends.
	Serve(ctx context.Context, p plug.Plugin) error
	// Update asks for changes of containers and returns those that failed.
	Update(ctx context.Context, plugin plug.ID, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error)
	// Runtime is how the runtime is called.
	Runtime() (name, version string)
	// RequestTimeout is the time that the plugin has for one call.
	RequestTimeout(plugin plug.ID) time.Duration
	// Admit returns why a plugin is not welcome, nil if it is. Events and policy are not
	// known yet.
	Admit(info plug.Info) error
}

// Peer is the process at the other end of a connection. What is not known is zero.
type Peer struct {
	PID        int32
	UID, GID   uint32
	Executable string
}

// Parts are what connections are made with.
type Parts struct {
	Log     *slog.Logger
	Tracer  trace.Tracer
	Metrics *Metrics
	Host    Host
	Modules *Modules
	// Peer tells the process at the other end of a connection.
	Peer          func(net.Conn) (Peer, error)
	ClientOptions []ttrpc.ClientOpts
	ServerOptions []ttrpc.ServerOpt
}

// Server serves plugin connections. Use NewServer.
type Server struct {
	cfg          Config
	parts        Parts
	stopping     atomic.Bool
	unregistered atomic.Int32
}

// NewServer makes a server; it does nothing before Serve or ServeLaunched.
func NewServer(cfg Config, parts Parts) *Server { return &Server{cfg: cfg, parts: parts} }

// Refuse makes all later registrations fail, because the hub ends.
func (s *Server) Refuse() { s.stopping.Store(true) }

func (s *Server) refuses() bool { return s.stopping.Load() }

// Serve accepts connections until ctx ends, and returns when all of them have ended. It
// closes the listener.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() {
		if err := l.Close(); err != nil {
			s.parts.Log.DebugContext(ctx, "plugin socket did not close cleanly", slog.Any("error", err))
		}
	})
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			// Most likely no descriptors are left; they come back.
			s.parts.Log.WarnContext(ctx, "plugin connection not accepted", slog.Any("error", err))
			if !pause.For(ctx, 100*time.Millisecond) {
				return nil
			}
			continue
		}
		wg.Go(func() { s.external(ctx, c) })
	}
}

// external serves one connection from outside.
func (s *Server) external(ctx context.Context, c net.Conn) {
	peer, err := s.parts.Peer(c)
	if err != nil {
		s.parts.Log.WarnContext(ctx, "process of a plugin not known", slog.Any("error", err))
	}
	if s.unregistered.Add(1) > maxUnregistered {
		s.unregistered.Add(-1)
		s.parts.Log.WarnContext(ctx, "too many connections without a registration", slog.Int("pid", int(peer.PID)))
		_ = c.Close() // nothing was said on it yet
		return
	}
	err = s.serve(ctx, c, plug.Info{
		Kind: plug.External, PID: peer.PID, UID: peer.UID, GID: peer.GID, Executable: peer.Executable,
	}, "")
	if err != nil {
		s.parts.Log.WarnContext(ctx, "plugin connection ended", slog.Int("pid", int(peer.PID)), slog.Int64("uid", int64(peer.UID)), slog.Any("error", err))
	}
}

// Launched is a plugin that was started by the hub.
type Launched struct {
	ID         plug.ID
	PID        int32
	UID, GID   uint32
	Executable string
	Config     string
}

// ServeLaunched serves the connection to a plugin that the hub has started, until it
// ends. The error says why the plugin never became active.
func (s *Server) ServeLaunched(ctx context.Context, c net.Conn, l Launched) error {
	s.unregistered.Add(1)
	return s.serve(ctx, c, plug.Info{
		ID: l.ID, Kind: plug.Launched, PID: l.PID, UID: l.UID, GID: l.GID, Executable: l.Executable,
	}, l.Config)
}

func (s *Server) serve(ctx context.Context, c net.Conn, info plug.Info, config string) error {
	registering := true
	named := func() {
		if registering {
			registering = false
			s.unregistered.Add(-1)
		}
	}
	defer named()
	p, l, err := s.connect(c)
	if err != nil {
		return fmt.Errorf("set up plugin connection: %w", err)
	}
	p.info = info
	var wg sync.WaitGroup
	defer wg.Wait()
	defer p.Close(plug.ErrLost)
	wg.Go(func() {
		err := p.server.Serve(ctx, l)
		p.log.DebugContext(ctx, "plugin stopped calling", slog.Any("error", err))
	})
	p.mux.Unblock()
	if err := p.awaitRegistration(ctx, s.cfg.RegistrationTimeout); err != nil {
		p.partWithRefused(err)
		return err
	}
	named()
	// The plugin waits for Configure now, without a limit of its own. Whatever happens
	// to us, it gets it.
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.RequestTimeout)
	err = p.configure(cctx, config)
	cancel()
	if err != nil {
		p.Close(err)
		return err
	}
	return s.parts.Host.Serve(ctx, p)
}

// partWithRefused lets the refusal reach the plugin before the connection is closed.
func (p *conn) partWithRefused(cause error) {
	timer := time.NewTimer(refusalGrace)
	defer timer.Stop()
	if !errors.Is(cause, plug.ErrLost) && !errors.Is(cause, context.DeadlineExceeded) && !errors.Is(cause, context.Canceled) {
		select {
		case <-p.done:
		case <-timer.C:
		}
	}
	p.Close(cause)
}
