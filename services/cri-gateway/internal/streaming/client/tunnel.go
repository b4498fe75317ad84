package client

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
)

// wsTunnel is the sub-protocol by which clients carry a whole SPDY connection for port
// forwarding in the binary messages of a WebSocket connection.
const wsTunnel = "SPDY/3.1+" + portforward.ProtocolV1Name

// OpenTunnel upgrades a request to WebSocket and returns writer and request as if the client
// had asked for SPDY on what the messages carry. Mistakes of the client are answered with an
// HTTP error.
func OpenTunnel(w http.ResponseWriter, r *http.Request) (http.ResponseWriter, *http.Request, error) {
	upgrader := websocket.Upgrader{
		CheckOrigin: func(*http.Request) bool { return true }, // the token in the URL is the authority
	}
	ws, err := upgrader.Upgrade(w, r, http.Header{"Sec-WebSocket-Protocol": {wsTunnel}})
	if err != nil {
		return nil, nil, fmt.Errorf("upgrade to WebSocket: %w", err)
	}
	ws.SetReadLimit(maxMessage)
	inner := r.Clone(r.Context())
	inner.Header = http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"SPDY/3.1"}, "X-Stream-Protocol-Version": {portforward.ProtocolV1Name},
	}
	return &tunnelWriter{conn: &tunnel{ws: ws}, header: http.Header{}}, inner, nil
}

// IsTunnel reports whether a client asks for port forwarding through a tunnel.
func IsTunnel(r *http.Request) bool {
	return websocket.IsWebSocketUpgrade(r) && slices.Contains(websocket.Subprotocols(r), wsTunnel)
}

// tunnelWriter is the answer to a client that has had its HTTP answer: what is said of the
// upgrade goes nowhere, and the connection is the tunnel.
type tunnelWriter struct {
	conn   *tunnel
	header http.Header
}

func (t *tunnelWriter) Header() http.Header         { return t.header }
func (t *tunnelWriter) WriteHeader(int)             {}
func (t *tunnelWriter) Write(p []byte) (int, error) { return len(p), nil }

// Hijack implements http.Hijacker.
func (t *tunnelWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return t.conn, bufio.NewReadWriter(bufio.NewReader(t.conn), bufio.NewWriter(t.conn)), nil
}

// tunnel is the bytes that binary messages carry. One goroutine may read and one may write.
type tunnel struct {
	ws      *websocket.Conn
	message io.Reader // what is left of a message
}

var _ net.Conn = (*tunnel)(nil)

func (t *tunnel) Read(p []byte) (int, error) {
	for {
		if t.message == nil {
			kind, message, err := t.ws.NextReader()
			if websocket.IsCloseError(err, websocket.CloseNormalClosure, websocket.CloseGoingAway) {
				return 0, io.EOF
			}
			if err != nil {
				return 0, err
			}
			if kind != websocket.BinaryMessage {
				return 0, errNotBinary
			}
			t.message = message
		}
		n, err := t.message.Read(p)
		if errors.Is(err, io.EOF) {
			t.message, err = nil, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

var errNotBinary = errors.New("a message of a tunnel is not binary")

func (t *tunnel) Write(p []byte) (int, error) {
	if err := t.ws.WriteMessage(websocket.BinaryMessage, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (t *tunnel) Close() error {
	text := websocket.FormatCloseMessage(websocket.CloseNormalClosure, "")
	_ = t.ws.WriteControl(websocket.CloseMessage, text, time.Now().Add(writeTimeout)) // it may be gone
	return t.ws.Close()
}

func (t *tunnel) LocalAddr() net.Addr  { return t.ws.LocalAddr() }
func (t *tunnel) RemoteAddr() net.Addr { return t.ws.RemoteAddr() }

func (t *tunnel) SetDeadline(at time.Time) error {
	return errors.Join(t.ws.SetReadDeadline(at), t.ws.SetWriteDeadline(at))
}
func (t *tunnel) SetReadDeadline(at time.Time) error  { return t.ws.SetReadDeadline(at) }
func (t *tunnel) SetWriteDeadline(at time.Time) error { return t.ws.SetWriteDeadline(at) }
