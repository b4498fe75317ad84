// Package hints is the server that shims send their events to.
//
// What a shim sends is a hint, not the truth: it may come late, twice or never. A hint is
// handed on in the order of arrival, and is dropped, with a count, when the receiver is too
// slow; a shim is never kept waiting, since that would stall its containers.
package hints

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	_ "github.com/containerd/containerd/api/events" // the types of the events
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/emptypb"
)

const (
	queueLength  = 1024
	drainTimeout = 2 * time.Second
)

// Handler is called with each event, one at a time.
type Handler func(ctx context.Context, topic string, event any)

// Server is the event service of shims.
type Server struct {
	log     *slog.Logger
	handle  Handler
	queue   chan hint
	dropped atomic.Uint64
	ttrpc   *ttrpc.Server
}

type hint struct {
	topic string
	event any
}

// New returns a server that hands events to handle. The options are those of the ttrpc
// server, such as interceptors.
func New(log *slog.Logger, handle Handler, opts ...ttrpc.ServerOpt) (*Server, error) {
	opts = append(slices.Clip(opts), ttrpc.WithServerHandshaker(ttrpc.UnixSocketRequireSameUser()))
	srv, err := ttrpc.NewServer(opts...)
	if err != nil {
		return nil, fmt.Errorf("shim event service: %w", err)
	}
	s := &Server{log: log, handle: handle, queue: make(chan hint, queueLength), ttrpc: srv}
	eventsapi.RegisterTTRPCEventsService(srv, s)
	return s, nil
}

// Dropped is how many events were dropped.
func (s *Server) Dropped() uint64 { return s.dropped.Load() }

// Forward takes one event of a shim.
func (s *Server) Forward(ctx context.Context, req *eventsapi.ForwardRequest) (*emptypb.Empty, error) {
	env := req.GetEnvelope()
	if env.GetEvent() == nil {
		return &emptypb.Empty{}, nil
	}
	event, err := typeurl.UnmarshalAny(env.GetEvent())
	if err != nil {
		// A shim would send it again and again after an error.
		s.log.DebugContext(ctx, "shim event of unknown type",
			slog.String("topic", env.GetTopic()), slog.String("type", env.GetEvent().GetTypeUrl()))
		return &emptypb.Empty{}, nil //nolint:nilerr // see above
	}
	select {
	case s.queue <- hint{topic: env.GetTopic(), event: event}:
	default:
		if n := s.dropped.Add(1); n&(n-1) == 0 {
			s.log.WarnContext(ctx, "shim events dropped", slog.Uint64("dropped", n))
		}
	}
	return &emptypb.Empty{}, nil
}

// Serve serves the events on a listener until ctx ends.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { s.dispatch(inner) })
	stopped := context.AfterFunc(inner, func() {
		sctx, done := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
		defer done()
		if s.ttrpc.Shutdown(sctx) != nil {
			_ = s.ttrpc.Close()
		}
	})
	err := s.ttrpc.Serve(inner, l)
	cancel()
	if stopped() {
		_ = s.ttrpc.Close()
	}
	wg.Wait()
	if errors.Is(err, ttrpc.ErrServerClosed) || ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("shim event service: %w", err)
}

// dispatch hands the events on.
func (s *Server) dispatch(ctx context.Context) {
	for {
		select {
		case h := <-s.queue:
			s.handle(ctx, h.topic, h.event)
		case <-ctx.Done():
			return
		}
	}
}

// Listen listens on the socket that shims know. The socket appears with mode 0600 and takes
// the place of an older one without a moment in which there is none. It stays when the
// listener is closed, since shims know no other.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("shim event socket %s is another kind of file: %w", path, errdefs.ErrFailedPrecondition)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, fmt.Errorf("shim event socket: %w", err)
	}
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("shim event socket: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", tmp)
	if err != nil {
		return nil, fmt.Errorf("shim event socket: %w", err)
	}
	if ul, ok := l.(*net.UnixListener); ok {
		ul.SetUnlinkOnClose(false)
	}
	if err := os.Chmod(tmp, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("shim event socket: %w", err), l.Close())
	}
	if err := os.Rename(tmp, path); err != nil {
		return nil, errors.Join(fmt.Errorf("shim event socket: %w", err), l.Close(), os.Remove(tmp))
	}
	return l, nil
}
