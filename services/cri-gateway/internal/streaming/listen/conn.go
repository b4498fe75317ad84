package listen

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// linger is how long a closed connection still takes in what the client sends.
// Closing with unread input would make the kernel throw away output that the
// client has not read yet.
const linger = 2 * time.Second

var (
	// ErrGone says that the client has closed the connection, or is not there any more.
	ErrGone = errors.New("client is gone")
	// ErrStopping says that the server ends.
	ErrStopping = errors.New("streaming server stops")
)

// Listener hands out connections that know when their client is gone. Use New.
type Listener struct {
	net.Listener

	// mu guards everything below.
	mu    sync.Mutex
	conns map[*conn]struct{}
}

// New returns a listener whose connections can be aborted together.
func New(l net.Listener) *Listener { return &Listener{Listener: l, conns: make(map[*conn]struct{})} }

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	tracked := &conn{Conn: c, forget: l.forget, ended: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns[tracked] = struct{}{}
	return tracked, nil
}

func (l *Listener) forget(c *conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
}

// Abort ends all connections, those that were taken over from the HTTP server too.
func (l *Listener) Abort() {
	l.mu.Lock()
	conns := make([]*conn, 0, len(l.conns))
	for c := range l.conns {
		conns = append(conns, c)
	}
	l.mu.Unlock()
	for _, c := range conns {
		c.end(ErrStopping)
		_ = c.Conn.Close()
	}
}

// conn is a connection whose end is noticed by whoever reads from or writes to it.
type conn struct {
	net.Conn
	forget func(*conn)

	once  sync.Once
	cause error
	// ended is closed when the client is gone or the connection is closed.
	ended chan struct{}
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.note(err)
	return n, err
}

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.note(err)
	return n, err
}

func (c *conn) note(err error) {
	// The HTTP server interrupts its own read by a deadline before it lets go of the
	// connection.
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.end(ErrGone)
	}
}

func (c *conn) end(cause error) {
	c.once.Do(func() {
		c.cause = cause
		close(c.ended)
		c.forget(c)
	})
}

// Close implements net.Conn. It lets the client read what is under way.
func (c *conn) Close() error {
	gone := false
	select {
	case <-c.ended:
		gone = true
	default:
	}
	c.end(net.ErrClosed)
	if tcp, ok := c.Conn.(*net.TCPConn); ok && !gone && tcp.CloseWrite() == nil {
		if tcp.SetReadDeadline(time.Now().Add(linger)) == nil {
			_, _ = io.Copy(io.Discard, tcp)
		}
	}
	// The SPDY library keeps a goroutine for the error of a connection that it finds closed.
	if err := c.Conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// context returns a context that ends with the connection.
func (c *conn) context(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-c.ended:
			cancel(c.cause)
		case <-stop:
		}
	}()
	return ctx, func() {
		close(stop)
		<-done
		cancel(nil)
	}
}

type connKey struct{}

// ConnContext keeps the connection of a request findable; it is for http.Server.ConnContext.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if secured, ok := c.(*tls.Conn); ok {
		c = secured.NetConn()
	}
	if tracked, ok := c.(*conn); ok {
		return context.WithValue(ctx, connKey{}, tracked)
	}
	return ctx
}

// Context returns a context that ends when the client of ctx's request is gone.
// An HTTP server does not tell once the connection has been taken over.
func Context(ctx context.Context) (context.Context, context.CancelFunc) {
	if c, ok := ctx.Value(connKey{}).(*conn); ok {
		return c.context(ctx)
	}
	return context.WithCancel(ctx)
}
