package client

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming/listen"
)

// The sub-protocols of a WebSocket session. The first byte of a message is its channel;
// in the base64 forms it is a digit and the rest is encoded.
const (
	wsPlain    = "channel.k8s.io"
	wsBase64   = "base64.channel.k8s.io"
	wsV4       = "v4.channel.k8s.io"
	wsV4Base64 = "v4.base64.channel.k8s.io"
	wsV5       = remotecommand.StreamProtocolV5Name
)

const (
	// maxMessage bounds a message of a client; clients cut at a few ten KiB.
	maxMessage = 32 << 20
	// maxChunk is the most output that goes into one message.
	maxChunk     = 32 << 10
	writeTimeout = 10 * time.Second
	// pingPeriod is how often idle sessions are probed. A client that is gone is
	// noticed after at most two periods even if nothing is read from it.
	pingPeriod = 20 * time.Second
)

// wsConn is a WebSocket connection with channels.
type wsConn struct {
	ws     *websocket.Conn
	base64 bool
	// closable tells that the client can close a channel.
	closable bool
	idle     time.Duration
	stdin    *io.PipeWriter // nil if the client has no standard input
	sizes    *sizes

	// mu serialises messages to the client.
	mu sync.Mutex
}

// openWebSocket upgrades a request to WebSocket. Mistakes of the client are answered
// with an HTTP error.
func openWebSocket(ctx context.Context, w http.ResponseWriter, r *http.Request, want Streams, limits Limits) (*Client, error) {
	offered := websocket.Subprotocols(r)
	supported := []string{wsV5, wsV4, wsV4Base64, wsPlain, wsBase64}
	protocol, ok := choose(offered, supported)
	if !ok {
		err := fmt.Errorf("sub-protocols %q are not supported", offered)
		http.Error(w, err.Error(), http.StatusForbidden)
		return nil, err
	}
	upgrader := websocket.Upgrader{
		CheckOrigin: func(*http.Request) bool { return true }, // the token in the URL is the authority
	}
	header := http.Header{}
	if protocol != "" {
		header.Set("Sec-WebSocket-Protocol", protocol)
	}
	ws, err := upgrader.Upgrade(w, r, header)
	if err != nil {
		return nil, fmt.Errorf("upgrade to WebSocket: %w", err)
	}
	ws.SetReadLimit(maxMessage)
	conn := &wsConn{
		ws:       ws,
		base64:   protocol == wsBase64 || protocol == wsV4Base64,
		closable: protocol == wsV5,
		idle:     limits.Idle,
		sizes:    newSizes(),
	}
	c := conn.client(ctx, want)
	c.structured = protocol == wsV5 || protocol == wsV4 || protocol == wsV4Base64
	if err := conn.greet(want); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// choose returns the first sub-protocol that the client offers and we have. A client
// that offers none speaks the oldest one.
func choose(offered, supported []string) (string, bool) {
	if len(offered) == 0 {
		return "", true
	}
	for _, o := range offered {
		if slices.Contains(supported, o) {
			return o, true
		}
	}
	return "", false
}

// client returns the session's client and starts to read from it.
func (c *wsConn) client(ctx context.Context, want Streams) *Client {
	out := &Client{sizes: c.sizes, outcome: c.channel(remotecommand.StreamErr), readers: &sync.WaitGroup{}}
	if want.Stdout {
		out.Stdout = c.channel(remotecommand.StreamStdOut)
	}
	if want.Stderr {
		out.Stderr = c.channel(remotecommand.StreamStdErr)
	}
	var stdin *io.PipeReader
	if want.Stdin {
		stdin, c.stdin = io.Pipe()
		out.Stdin = stdin
	}
	out.readers.Go(c.readAll)
	ctx, cancel := context.WithCancel(ctx)
	out.readers.Go(func() { c.ping(ctx) })
	out.close = func() {
		cancel()
		c.goodbye()
		if stdin != nil {
			_ = stdin.Close()
		}
		_ = c.ws.Close()
		out.readers.Wait()
	}
	return out
}

// greet tells the client that the session is open, by an empty message.
func (c *wsConn) greet(want Streams) error {
	channel := remotecommand.StreamErr
	switch {
	case want.Stdout:
		channel = remotecommand.StreamStdOut
	case want.Stderr:
		channel = remotecommand.StreamStdErr
	}
	return c.write(channel, nil)
}

// goodbye sends the close frame; the client may be gone already.
func (c *wsConn) goodbye() {
	text := websocket.FormatCloseMessage(websocket.CloseNormalClosure, "")
	_ = c.ws.WriteControl(websocket.CloseMessage, text, time.Now().Add(writeTimeout))
}

// ping probes the connection, so that a client that is gone is noticed even while its
// input is not read.
func (c *wsConn) ping(ctx context.Context) {
	ticker := time.NewTicker(pingPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if c.ws.WriteControl(websocket.PingMessage, nil, time.Now().Add(writeTimeout)) != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// readAll takes in the client's messages until the connection ends or has been idle for
// too long, and then ends the session.
func (c *wsConn) readAll() {
	defer func() {
		_ = c.ws.Close()
		if c.stdin != nil {
			_ = c.stdin.CloseWithError(listen.ErrGone)
		}
	}()
	for {
		c.touch()
		_, message, err := c.ws.ReadMessage()
		if err != nil {
			return
		}
		c.receive(message)
	}
}

// touch puts off the end of an idle session.
func (c *wsConn) touch() {
	if c.idle > 0 {
		_ = c.ws.SetReadDeadline(time.Now().Add(c.idle))
	}
}

func (c *wsConn) receive(message []byte) {
	if len(message) == 0 {
		return
	}
	channel, data := int(message[0]), message[1:]
	if c.closable && channel == remotecommand.StreamClose {
		if len(data) == 1 && data[0] == remotecommand.StreamStdIn && c.stdin != nil {
			_ = c.stdin.Close()
		}
		return
	}
	if c.base64 {
		channel -= '0'
		decoded, err := base64.StdEncoding.DecodeString(string(data))
		if err != nil {
			return
		}
		data = decoded
	}
	switch channel {
	case remotecommand.StreamStdIn:
		if c.stdin != nil && len(data) > 0 {
			// Fails once nobody takes input any more; the rest of it is dropped.
			_, _ = c.stdin.Write(data)
		}
	case remotecommand.StreamResize:
		c.sizes.give(data)
	}
}

// channel returns a writer to one of the client's channels.
func (c *wsConn) channel(number int) io.Writer {
	return writerFunc(func(p []byte) (int, error) {
		written := 0
		for len(p) > 0 {
			chunk := p[:min(len(p), maxChunk)]
			if err := c.write(number, chunk); err != nil {
				return written, err
			}
			written += len(chunk)
			p = p[len(chunk):]
		}
		return written, nil
	})
}

func (c *wsConn) write(channel int, data []byte) error {
	kind, message := websocket.BinaryMessage, append([]byte{byte(channel)}, data...)
	if c.base64 {
		kind = websocket.TextMessage
		message = append([]byte{byte('0' + channel)}, base64.StdEncoding.EncodeToString(data)...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.touch()
	if err := c.ws.WriteMessage(kind, message); err != nil {
		return errors.Join(listen.ErrGone, err)
	}
	return nil
}

type writerFunc func(p []byte) (int, error)

// Write implements io.Writer.
func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
