package streaming

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/client"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/listen"
)

const headerTimeout = 10 * time.Second

// Config says where and how to serve.
type Config struct {
	// Listen is a host:port; port 0 takes a free one.
	Listen string
	// TLS serves HTTPS if it is not nil.
	TLS *tls.Config
	// IdleTimeout ends sessions over which nothing was sent for so long.
	IdleTimeout time.Duration
	// CreationTimeout ends SPDY sessions whose client does not open its streams.
	CreationTimeout time.Duration
}

// execSession is a command to run in a container.
type execSession struct {
	containerID string
	command     []string
	streams     client.Streams
}

// attachSession is a container to attach to.
type attachSession struct {
	containerID string
	// streams are those that the client opens.
	streams client.Streams
	// terminal and stdin tell what the container has.
	terminal, stdin bool
}

// forwardSession is a sandbox whose ports a client wants to reach.
type forwardSession struct {
	sandboxID string
	// ports are used with WebSocket; SPDY clients name them later.
	ports []int32
}

// Server serves sessions. Its methods may be called concurrently.
type Server struct {
	cfg        Config
	containers containerv1.ContainerServiceClient
	sandboxes  sandboxv1.SandboxServiceClient
	log        *slog.Logger
	sessions   gate

	execs    *tokens[execSession]
	attaches *tokens[attachSession]
	forwards *tokens[forwardSession]

	// listening is closed when base is set.
	listening chan struct{}
	base      *url.URL
}

// New returns a server that does not listen yet.
func New(
	cfg Config, containers containerv1.ContainerServiceClient, sandboxes sandboxv1.SandboxServiceClient, log *slog.Logger,
) *Server {
	return &Server{
		cfg:        cfg,
		containers: containers,
		sandboxes:  sandboxes,
		log:        log,
		execs:      newTokens[execSession](),
		attaches:   newTokens[attachSession](),
		forwards:   newTokens[forwardSession](),
		listening:  make(chan struct{}),
	}
}

// Run listens and serves until ctx ends, then ends all sessions and waits for them. It
// must be called once.
func (s *Server) Run(ctx context.Context, ready func()) error {
	var lc net.ListenConfig
	tcp, err := lc.Listen(ctx, "tcp", s.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", s.cfg.Listen, err)
	}
	lis := listen.New(tcp)
	var served net.Listener = lis
	s.base = &url.URL{Scheme: "http", Host: tcp.Addr().String()}
	if s.cfg.TLS != nil {
		served = tls.NewListener(lis, s.cfg.TLS)
		s.base.Scheme = "https"
	}
	close(s.listening)
	httpServer := &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: headerTimeout,
		ConnContext:       listen.ConnContext,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- httpServer.Serve(served) }()
	ready()
	s.log.InfoContext(ctx, "streaming server listens", slog.String("address", tcp.Addr().String()))
	select {
	case err = <-failed:
	case <-ctx.Done():
		_ = httpServer.Close()
		err = <-failed
	}
	lis.Abort()
	s.sessions.close()
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		mux.HandleFunc(method+" /exec/{token}", s.serveExec)
		mux.HandleFunc(method+" /attach/{token}", s.serveAttach)
		mux.HandleFunc(method+" /portforward/{token}", s.servePortForward)
	}
	return mux
}

// ExecURL returns a URL that runs the command when a client comes.
// Errors: Unavailable before the server listens, ResourceExhausted.
func (s *Server) ExecURL(req *criv1.ExecRequest) (string, error) {
	return urlOf(s, "exec", s.execs, execSession{
		containerID: req.GetContainerId(),
		command:     req.GetCmd(),
		streams:     client.Streams{Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr(), Terminal: req.GetTty()},
	})
}

// AttachURL returns a URL that attaches to the container when a client comes. terminal
// and stdin tell what the container was made with.
// Errors: Unavailable before the server listens, ResourceExhausted.
func (s *Server) AttachURL(req *criv1.AttachRequest, terminal, stdin bool) (string, error) {
	return urlOf(s, "attach", s.attaches, attachSession{
		containerID: req.GetContainerId(),
		streams:     client.Streams{Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr(), Terminal: req.GetTty()},
		terminal:    terminal,
		stdin:       stdin,
	})
}

// PortForwardURL returns a URL that reaches the sandbox's ports when a client comes.
// Errors: Unavailable before the server listens, ResourceExhausted.
func (s *Server) PortForwardURL(req *criv1.PortForwardRequest) (string, error) {
	return urlOf(s, "portforward", s.forwards, forwardSession{sandboxID: req.GetPodSandboxId(), ports: req.GetPort()})
}

func urlOf[T any](s *Server, path string, tokens *tokens[T], req T) (string, error) {
	select {
	case <-s.listening:
	default:
		return "", fmt.Errorf("streaming server does not listen: %w", errdefs.ErrUnavailable)
	}
	token, err := tokens.put(req)
	if err != nil {
		return "", err
	}
	return s.base.JoinPath(path, token).String(), nil
}

func (s *Server) serveExec(w http.ResponseWriter, r *http.Request) {
	req, ok := s.execs.take(r.PathValue("token"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	s.serveSession(w, r, req.streams, func(ctx context.Context, c *client.Client) error {
		return s.exec(ctx, req, c)
	})
}

func (s *Server) serveAttach(w http.ResponseWriter, r *http.Request) {
	req, ok := s.attaches.take(r.PathValue("token"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	s.serveSession(w, r, req.streams, func(ctx context.Context, c *client.Client) error {
		return s.attach(ctx, req, c)
	})
}

// serveSession opens the client's streams, does the work and reports its outcome.
func (s *Server) serveSession(
	w http.ResponseWriter, r *http.Request, want client.Streams, work func(context.Context, *client.Client) error,
) {
	if !s.sessions.enter() {
		http.Error(w, listen.ErrStopping.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.sessions.leave()
	ctx, cancel := listen.Context(r.Context())
	defer cancel()
	c, err := client.Open(ctx, w, r, want, client.Limits{Idle: s.cfg.IdleTimeout, Creation: s.cfg.CreationTimeout})
	if err != nil {
		s.log.DebugContext(ctx, "streams not opened", slog.Any("error", err))
		return
	}
	defer c.Close()
	err = work(ctx, c)
	if err := c.Report(err); err != nil && ctx.Err() == nil {
		s.log.DebugContext(ctx, "outcome not delivered", slog.Any("error", err))
	}
}

func (s *Server) servePortForward(w http.ResponseWriter, r *http.Request) {
	req, ok := s.forwards.take(r.PathValue("token"))
	if !ok {
		http.NotFound(w, r)
		return
	}
	if !s.sessions.enter() {
		http.Error(w, listen.ErrStopping.Error(), http.StatusServiceUnavailable)
		return
	}
	defer s.sessions.leave()
	ctx, cancel := listen.Context(r.Context())
	defer cancel()
	if client.IsTunnel(r) {
		var err error
		if w, r, err = client.OpenTunnel(w, r); err != nil {
			s.log.DebugContext(ctx, "tunnel not opened", slog.Any("error", err))
			return
		}
	}
	f := &forwarder{ctx: ctx, sandboxes: s.sandboxes}
	defer f.streams.close()
	portforward.ServePortForward(w, r, f, req.sandboxID, "", &portforward.V4Options{Ports: req.ports},
		s.cfg.IdleTimeout, s.cfg.CreationTimeout, portforward.SupportedProtocols)
}
