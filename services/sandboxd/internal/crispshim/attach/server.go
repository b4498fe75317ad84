package attach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// askTime bounds the wait for a connection's request.
	askTime = 10 * time.Second
	// writeTime bounds the wait for a client to take one frame.
	writeTime = 30 * time.Second
)

// Target is a container as this package sees it.
type Target interface {
	// Hub is where the container's output goes; nil if there is none.
	Hub() *Hub
	// Drained is closed when all output has been written.
	Drained() <-chan struct{}
	// ReopenLog opens the log anew.
	ReopenLog() error
	// WriteStdin writes input. It blocks until the container takes it or alive, which is
	// asked now and then, says no. It fails with ErrFailedPrecondition if the container has
	// no open input.
	WriteStdin(p []byte, alive func() bool) error
	// StdinEnded says that a client's input has ended.
	StdinEnded()
}

// Server serves connections. It is safe for concurrent use.
type Server struct {
	find func(id string) (Target, error)
	log  *slog.Logger
	path string
	wg   sync.WaitGroup

	// mu guards the rest.
	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]struct{}
	closed   bool
}

// NewServer returns a server that finds containers with find. It listens at a path once
// Listen is called.
func NewServer(path string, find func(id string) (Target, error), log *slog.Logger) *Server {
	return &Server{find: find, log: log, path: path, conns: map[net.Conn]struct{}{}}
}

// Listen makes the socket, if there is none yet, and serves in the background until Close.
func (s *Server) Listen(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener != nil || s.closed {
		return nil
	}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", s.path)
	if err != nil {
		return fmt.Errorf("stream socket: %w", err)
	}
	if err := os.Chmod(s.path, 0o600); err != nil {
		return errors.Join(err, l.Close())
	}
	s.listener = l
	s.wg.Go(func() { s.accept(context.WithoutCancel(ctx), l) })
	return nil
}

func (s *Server) accept(ctx context.Context, l net.Listener) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.WarnContext(ctx, "stream connection not accepted", slog.String("error", err.Error()))
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		if !s.add(conn) {
			_ = conn.Close()
			return
		}
		s.wg.Go(func() {
			defer s.drop(conn)
			if err := s.serve(conn); err != nil {
				s.log.DebugContext(ctx, "stream connection ended", slog.String("error", err.Error()))
			}
		})
	}
}

func (s *Server) add(conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.conns[conn] = struct{}{}
	return true
}

func (s *Server) drop(conn net.Conn) {
	_ = conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, conn)
}

// Close ends all connections and removes the socket.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	var err error
	if s.listener != nil {
		err = s.listener.Close()
	}
	for conn := range s.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

// serve serves one connection.
func (s *Server) serve(conn net.Conn) error {
	buf := make([]byte, 4<<10)
	_ = conn.SetReadDeadline(time.Now().Add(askTime))
	kind, payload, err := ReadFrame(conn, buf)
	if err != nil {
		return err
	}
	_ = conn.SetReadDeadline(time.Time{})
	var ask Ask
	if kind != Request || json.Unmarshal(payload, &ask) != nil {
		return refuse(conn, fmt.Errorf("request: %w", errdefs.ErrInvalidArgument))
	}
	t, err := s.find(ask.ID)
	if err != nil {
		return refuse(conn, err)
	}
	switch ask.Op {
	case OpAttach:
		return attach(conn, t, ask)
	case OpReopen:
		err = t.ReopenLog()
	case OpDrain:
		err = drain(conn, t)
	default:
		err = fmt.Errorf("operation %.32q: %w", ask.Op, errdefs.ErrNotImplemented)
	}
	if err != nil {
		return refuse(conn, err)
	}
	return send(conn, Granted, nil)
}

func refuse(conn net.Conn, err error) error {
	return errors.Join(err, send(conn, Refused, EncodeError(err)))
}

func send(conn net.Conn, kind Kind, payload []byte) error {
	_ = conn.SetWriteDeadline(time.Now().Add(writeTime))
	return WriteFrame(conn, kind, payload)
}

// errGone says that the client has closed the connection.
var errGone = errors.New("client has gone")

// drain waits for the end of the output, or of the connection.
func drain(conn net.Conn, t Target) error {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = conn.Read(make([]byte, 1))
	}()
	select {
	case <-t.Drained():
		// Unblock the reading of a client that waits for the answer.
		_ = conn.SetReadDeadline(time.Unix(1, 0))
		<-gone
		return nil
	case <-gone:
		return errGone
	}
}

// attach serves an attached client until the container's output ends or the client goes.
func attach(conn net.Conn, t Target, ask Ask) error {
	hub := t.Hub()
	if hub == nil {
		return refuse(conn, fmt.Errorf("container %q has no streams to attach to: %w", ask.ID, errdefs.ErrFailedPrecondition))
	}
	c := hub.join(ask)
	defer hub.leave(c)
	if err := send(conn, Granted, nil); err != nil {
		return err
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		input(conn, t, ask.Stdin)
	}()
	err := c.serve(conn, t.Drained(), gone)
	// The input may wait for a frame, or for the container to read.
	_ = conn.Close()
	<-gone
	return err
}

// connected says whether the other side still holds the connection. It looks past what was
// sent and not read yet.
func connected(conn net.Conn) bool {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	alive := false
	err = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, 0)
		alive = err != nil || n == 0 || fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) == 0
	})
	return err == nil && alive
}

// input hands a client's input to the container until the connection ends.
func input(conn net.Conn, t Target, wanted bool) {
	buf := make([]byte, MaxPayload)
	ended := !wanted
	end := func() {
		if !ended {
			ended = true
			t.StdinEnded()
		}
	}
	defer end()
	for {
		kind, payload, err := ReadFrame(conn, buf)
		switch {
		case err != nil:
			return
		case kind != Input || ended:
			continue
		case len(payload) == 0:
			end()
		default:
			if t.WriteStdin(payload, func() bool { return connected(conn) }) != nil {
				ended = true
			}
		}
	}
}

// serve writes a client's pieces until the output has ended or the client is gone.
func (c *client) serve(conn net.Conn, drained, gone <-chan struct{}) error {
	for {
		select {
		case p := <-c.queue:
			if err := send(conn, p.kind, p.data); err != nil {
				return err
			}
		case <-c.kicked:
			return refuse(conn, errTooSlow)
		case <-gone:
			return errGone
		case <-drained:
			return c.rest(conn)
		}
	}
}

// rest writes what is queued when the output has ended.
func (c *client) rest(conn net.Conn) error {
	for {
		select {
		case p := <-c.queue:
			if err := send(conn, p.kind, p.data); err != nil {
				return err
			}
		default:
			select {
			case <-c.kicked:
				return refuse(conn, errTooSlow)
			default:
				return send(conn, End, nil)
			}
		}
	}
}
