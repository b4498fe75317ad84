// Package broker is the NATS server inside the process, or the way to one outside.
//
// With a server of its own it keeps a JetStream store that survives the death of the
// process at any moment: an acknowledged message has been handed to the kernel. It
// accepts only clients with one of the known nkeys. It knows nothing about streams.
package broker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	natsd "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/crisp-cri/crisp/services/eventbus/internal/access"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
)

const (
	startTimeout = 30 * time.Second
	startPoll    = 100 * time.Millisecond
	stopTimeout  = 20 * time.Second
)

// Broker is a server that is run by Part, or one that runs elsewhere.
type Broker struct {
	cfg  Config
	log  *slog.Logger
	keys *access.Keys
	srv  *natsd.Server
	out  *logger
}

// New prepares the server for the users of the named stream; Part starts it. With an
// external cluster keys may be nil.
func New(cfg Config, keys *access.Keys, stream string, log *slog.Logger) (*Broker, error) {
	b := &Broker{cfg: cfg, log: log, keys: keys, out: &logger{log: log}}
	if cfg.External() {
		return b, nil
	}
	opts, err := options(cfg, keys, stream)
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	b.srv, err = natsd.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	b.srv.SetLogger(b.out, false, false)
	return b, nil
}

// Part runs the server; it is ready when clients can connect and JetStream is on. For
// an external cluster it does nothing.
func (b *Broker) Part() lifecycle.Part {
	return lifecycle.Part{Name: "broker", StopTimeout: stopTimeout, Run: b.run}
}

func (b *Broker) run(ctx context.Context, ready func()) error {
	if b.srv == nil {
		ready()
		<-ctx.Done()
		return nil
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		b.srv.Start()
		b.srv.WaitForShutdown()
	}()
	defer func() {
		b.srv.Shutdown()
		<-stopped
	}()
	if err := b.awaitReady(ctx); err != nil {
		return err
	}
	b.log.InfoContext(ctx, "broker listening", slog.String("address", b.srv.Addr().String()))
	ready()
	select {
	case <-ctx.Done():
		return nil
	case <-stopped:
		return fmt.Errorf("the server stopped by itself: %s: %w", b.out.lastFatal(), errdefs.ErrInternal)
	}
}

// awaitReady polls, because the server cannot be waited for with a context and says
// only in its log why it will never be ready.
func (b *Broker) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for !b.srv.ReadyForConnections(startPoll) {
		if fatal := b.out.lastFatal(); fatal != "" {
			return fmt.Errorf("start: %s: %w", fatal, errdefs.ErrFailedPrecondition)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("start: not ready: %w", context.Cause(ctx))
		}
	}
	return b.Ready(ctx)
}

// Ready returns nil if JetStream takes messages. About an external cluster it knows
// nothing and returns nil.
func (b *Broker) Ready(context.Context) error {
	if b.srv == nil {
		return nil
	}
	if !b.srv.Running() || !b.srv.JetStreamEnabled() {
		return fmt.Errorf("jetstream is off: %s: %w", b.out.lastFatal(), errdefs.ErrUnavailable)
	}
	// The server's own Healthz asks the same, and takes it for an error if the process does not run for a
	// millisecond.
	if b.srv.Addr() == nil {
		return fmt.Errorf("the server does not listen: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// Clients returns the number of connected clients, 0 for an external cluster.
func (b *Broker) Clients() int {
	if b.srv == nil {
		return 0
	}
	return b.srv.NumClients()
}

// Addr returns where the server listens, nil before it does.
func (b *Broker) Addr() net.Addr {
	if b.srv == nil {
		return nil
	}
	return b.srv.Addr()
}

// Connect returns a connection with all rights. The caller closes it. For an external
// cluster it returns at once and connects when the cluster is there.
func (b *Broker) Connect() (*nats.Conn, error) {
	opts := []nats.Option{
		nats.Name("crisp eventbus"), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			b.log.Warn("broker reported an error", slog.Any("error", err))
		}),
	}
	if b.srv != nil {
		public, sign, err := b.keys.Own()
		if err != nil {
			return nil, err
		}
		return nats.Connect("", append(opts, nats.InProcessServer(b.srv), nats.Nkey(public, sign))...)
	}
	if b.cfg.NkeySeedFile != "" {
		opt, err := nats.NkeyOptionFromSeed(b.cfg.NkeySeedFile)
		if err != nil {
			return nil, fmt.Errorf("nkey seed %s: %w", b.cfg.NkeySeedFile, err)
		}
		opts = append(opts, opt)
	}
	if b.cfg.CAFile != "" {
		opts = append(opts, nats.RootCAs(b.cfg.CAFile))
	}
	return nats.Connect(b.cfg.URL, opts...)
}

func options(cfg Config, keys *access.Keys, stream string) (*natsd.Options, error) {
	host, portText, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return nil, err
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return nil, fmt.Errorf("port %q: %w", portText, errdefs.ErrInvalidArgument)
	}
	if port == 0 {
		port = natsd.RANDOM_PORT
	}
	users, err := keys.Users(stream)
	if err != nil {
		return nil, err
	}
	opts := &natsd.Options{
		Host: host, Port: port, NoSigs: true,
		JetStream: true, StoreDir: cfg.StoreDir, JetStreamDomain: cfg.Domain, JetStreamMaxStore: int64(cfg.MaxStore),
		MaxPayload: int32(cfg.MaxPayload),
		SyncAlways: cfg.SyncAlways, SyncInterval: cfg.SyncInterval.Std(),
		DisableJetStreamBanner: true, Nkeys: users,
	}
	if cfg.TLS.CertFile != "" {
		if opts.TLSConfig, err = serverTLS(cfg.TLS); err != nil {
			return nil, err
		}
		opts.TLS, opts.TLSVerify = true, cfg.TLS.CAFile != ""
	}
	for _, r := range cfg.LeafRemotes {
		remote, err := leafRemote(r)
		if err != nil {
			return nil, fmt.Errorf("leaf remote %s: %w", r.URL, err)
		}
		opts.LeafNode.Remotes = append(opts.LeafNode.Remotes, remote)
	}
	return opts, nil
}

func serverTLS(cfg TLSConfig) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(cfg.CertFile, cfg.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	out := &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13}
	if cfg.CAFile != "" {
		if out.ClientCAs, err = pool(cfg.CAFile); err != nil {
			return nil, err
		}
		out.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return out, nil
}

func pool(path string) (*x509.CertPool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("authority: %w", err)
	}
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("authority %s holds no certificate: %w", path, errdefs.ErrInvalidArgument)
	}
	return p, nil
}

func leafRemote(r LeafRemote) (*natsd.RemoteLeafOpts, error) {
	u, err := url.Parse(r.URL)
	if err != nil {
		return nil, err
	}
	out := &natsd.RemoteLeafOpts{URLs: []*url.URL{u}}
	if r.CAFile != "" {
		roots, err := pool(r.CAFile)
		if err != nil {
			return nil, err
		}
		out.TLS, out.TLSConfig = true, &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	if r.NkeySeedFile == "" {
		return out, nil
	}
	text, err := os.ReadFile(r.NkeySeedFile)
	if err != nil {
		return nil, err
	}
	pair, err := nkeys.ParseDecoratedNKey(text)
	if err != nil {
		return nil, err
	}
	out.Nkey, err = pair.PublicKey()
	out.SignatureCB = func(nonce []byte) (string, []byte, error) {
		public, keyErr := pair.PublicKey()
		sig, signErr := pair.Sign(nonce)
		return public, sig, errors.Join(keyErr, signErr)
	}
	return out, err
}
