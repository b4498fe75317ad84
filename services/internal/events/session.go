package events

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	pingInterval      = 10 * time.Second
	maxPingsOut       = 2
	minReconnectDelay = 100 * time.Millisecond
	maxReconnectDelay = 2 * time.Second
)

// session holds the one connection of a publisher or consumer. It is made when it is
// first wanted and made anew when the client library gave it up, which it does after
// the bus refused the identity twice: the seed file is then read again.
type session struct {
	cfg       ClientConfig
	tel       *telemetry.Telemetry
	connected *prometheus.GaugeVec
	role      string
	// told hears when the connection comes or goes, besides the metric; it may be nil.
	told func(up bool)
	// turn is a mutex that can be waited for with a context. Its holder may dial.
	turn chan struct{}
	// nc and closed are guarded by turn.
	nc     *nats.Conn
	closed bool
}

func newSession(cfg ClientConfig, tel *telemetry.Telemetry, role string, told func(up bool)) *session {
	s := &session{cfg: cfg, tel: tel, role: role, told: told, turn: make(chan struct{}, 1)}
	s.connected = telemetry.Register(tel, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "crisp_events_connected",
		Help: "1 while there is a connection to the bus.",
	}, []string{"role"}))
	s.tell(false)
	return s
}

func (s *session) tell(up bool) {
	value := 0.0
	if up {
		value = 1
	}
	s.connected.WithLabelValues(s.role).Set(value)
	if s.told != nil {
		s.told(up)
	}
}

// get returns a connection that is connected at this moment, waiting for one until ctx
// is done. Without one it returns errdefs.ErrUnavailable.
func (s *session) get(ctx context.Context) (*nats.Conn, error) {
	nc, err := s.conn(ctx)
	if err != nil {
		return nil, unavailable(err)
	}
	return nc, s.awaitConnected(ctx, nc)
}

func (s *session) conn(ctx context.Context) (*nats.Conn, error) {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if s.closed {
		return nil, nats.ErrConnectionClosed
	}
	if s.nc == nil || s.nc.IsClosed() {
		nc, err := s.dial()
		if err != nil {
			return nil, err
		}
		s.nc = nc
	}
	return s.nc, nil
}

func (s *session) awaitConnected(ctx context.Context, nc *nats.Conn) error {
	changes := nc.StatusChanged(nats.CONNECTED, nats.CLOSED)
	defer nc.RemoveStatusListener(changes)
	for {
		switch nc.Status() {
		case nats.CONNECTED:
			return nil
		case nats.CLOSED:
			return unavailable(errors.Join(nats.ErrConnectionClosed, nc.LastError()))
		default:
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return unavailable(errors.Join(context.Cause(ctx), nc.LastError()))
		}
	}
}

// close ends the connection for good. It waits at most for one attempt to connect.
func (s *session) close() {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.closed = true
	if s.nc != nil {
		s.nc.Close()
	}
}

func (s *session) dial() (*nats.Conn, error) {
	opts, err := s.options()
	if err != nil {
		return nil, err
	}
	return nats.Connect(s.cfg.URL, opts...)
}

func (s *session) options() ([]nats.Option, error) {
	opts := []nats.Option{
		nats.Name("crisp " + s.tel.Service + " " + s.role),
		nats.Timeout(s.cfg.ConnectTimeout.Std()),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.CustomReconnectDelay(func(attempts int) time.Duration {
			return min(minReconnectDelay*time.Duration(attempts), maxReconnectDelay)
		}),
		nats.ReconnectBufSize(-1), // no hidden queue: what is not sent is reported
		nats.PingInterval(pingInterval),
		nats.MaxPingsOutstanding(maxPingsOut),
	}
	opts = append(opts, s.handlers()...)
	if s.cfg.NkeySeedFile != "" {
		opt, err := identity(s.cfg.NkeySeedFile)
		if err != nil {
			return nil, err
		}
		opts = append(opts, opt)
	}
	if s.cfg.CAFile != "" {
		opts = append(opts, nats.RootCAs(s.cfg.CAFile))
	}
	if s.cfg.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(s.cfg.CertFile, s.cfg.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("client certificate: %w", err)
		}
		opts = append(opts, nats.Secure(&tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13}))
	}
	return opts, nil
}

// handlers log what happens to the connection. They run without a caller, so their
// records have no trace.
func (s *session) handlers() []nats.Option {
	log := s.tel.Log.With(slog.String("role", s.role))
	return []nats.Option{
		nats.ConnectHandler(func(*nats.Conn) { s.tell(true) }),
		nats.ReconnectHandler(func(*nats.Conn) {
			s.tell(true)
			log.Info("bus connected again")
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			s.tell(false)
			if err != nil { // without an error the process itself has closed the connection
				log.Warn("bus disconnected", slog.Any(telemetry.KeyError, err))
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			log.Warn("bus reported an error", slog.Any(telemetry.KeyError, err))
		}),
		nats.ClosedHandler(func(*nats.Conn) { s.tell(false) }),
	}
}

// identity reads the seed and keeps it for the signatures of later reconnects.
func identity(path string) (nats.Option, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("nkey seed: %w", err)
	}
	pair, err := nkeys.ParseDecoratedNKey(text)
	if err != nil {
		return nil, fmt.Errorf("nkey seed %s: %w", path, err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("nkey seed %s: %w", path, err)
	}
	return nats.Nkey(public, pair.Sign), nil
}

func unavailable(err error) error {
	return fmt.Errorf("event bus: %w: %w", errdefs.ErrUnavailable, err)
}

// classify names the kind of an error of the client library.
func classify(err error) error {
	switch {
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject):
		return fmt.Errorf("event bus: %w: %w", errdefs.ErrInvalidArgument, err)
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrConsumerNotFound):
		return fmt.Errorf("event bus: %w: %w", errdefs.ErrNotFound, err)
	}
	return unavailable(err)
}
