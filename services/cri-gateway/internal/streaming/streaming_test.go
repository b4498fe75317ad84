package streaming_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/gorilla/websocket"
	"google.golang.org/grpc"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/backendtest"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/streaming"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type bench struct {
	*streaming.Server
	sandboxd *backendtest.Sandboxd
	// running counts the sessions at sandboxd, sized the sizes that they were given.
	running, sized atomic.Int32
}

func newBench(t *testing.T) *bench {
	t.Helper()
	return newTLSBench(t, nil)
}

// newTLSBench serves HTTPS if there is a configuration for it.
func newTLSBench(t *testing.T, tlsConfig *tls.Config) *bench {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	b := &bench{sandboxd: backendtest.NewSandboxd(&backendtest.Journal{})}
	b.sandboxd.Exec = b.exec
	b.sandboxd.Attach = b.attach
	client := backend.NewSandboxd(testkit.GRPC(t, tel, b.sandboxd.Registrations()...), testkit.Patience)
	cfg := streaming.Config{Listen: "127.0.0.1:0", TLS: tlsConfig, IdleTimeout: time.Minute, CreationTimeout: testkit.Patience}
	b.Server = streaming.New(cfg, client.Containers, client.Sandboxes, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- b.Run(ctx, func() { close(ready) }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	<-ready
	return b
}

type execStream = grpc.BidiStreamingServer[containerv1.ExecRequest, containerv1.ExecResponse]

func stdout(data string) *containerv1.ExecResponse {
	return &containerv1.ExecResponse{Message: &containerv1.ExecResponse_Output{
		Output: &containerv1.Output{Output: &containerv1.Output_Stdout{Stdout: []byte(data)}},
	}}
}

func stderr(data string) *containerv1.ExecResponse {
	return &containerv1.ExecResponse{Message: &containerv1.ExecResponse_Output{
		Output: &containerv1.Output{Output: &containerv1.Output_Stderr{Stderr: []byte(data)}},
	}}
}

func exit(code int32) *containerv1.ExecResponse {
	return &containerv1.ExecResponse{Message: &containerv1.ExecResponse_ExitCode{ExitCode: code}}
}

// exec knows a few commands.
func (b *bench) exec(stream execStream, start *containerv1.ExecStart) error {
	b.running.Add(1)
	defer b.running.Add(-1)
	send := func(ms ...*containerv1.ExecResponse) error {
		for _, m := range ms {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		return nil
	}
	if start.GetCmd()[0] == "missing" {
		return fmt.Errorf("no such file: %w", errdefs.ErrNotFound)
	}
	started := &containerv1.ExecResponse{Message: &containerv1.ExecResponse_Started{Started: &containerv1.Started{}}}
	if err := send(started); err != nil {
		return err
	}
	switch start.GetCmd()[0] {
	case "silent":
		<-stream.Context().Done()
		return stream.Context().Err()
	case "fail":
		return send(stdout("out"), stderr("err"), exit(7))
	case "talk":
		for range 2000 {
			if err := send(stdout(strings.Repeat("x", 1000))); err != nil {
				return err
			}
		}
		return send(exit(0))
	case "sum":
		sum := sha256.New()
		for {
			m, err := stream.Recv()
			if err != nil {
				return err
			}
			if m.GetInput().GetStdinClosed() != nil {
				return send(stdout(hex.EncodeToString(sum.Sum(nil))), exit(0))
			}
			sum.Write(m.GetInput().GetStdin())
		}
	case "sizes":
		for {
			m, err := stream.Recv()
			if err != nil {
				return err
			}
			if m.GetInput().GetStdinClosed() != nil {
				return send(exit(0))
			}
			size := m.GetInput().GetResize()
			if err := send(stdout(fmt.Sprintf("%dx%d;", size.GetWidth(), size.GetHeight()))); err != nil {
				return err
			}
			b.sized.Add(1)
		}
	}
	return send(exit(127))
}

// attach greets and then waits for the client to go.
func (b *bench) attach(stream grpc.BidiStreamingServer[containerv1.AttachRequest, containerv1.AttachResponse], start *containerv1.AttachStart) error {
	b.running.Add(1)
	defer b.running.Add(-1)
	greeting := fmt.Sprintf("tty=%v stdin=%v", start.GetTty(), start.GetStdin())
	out := &containerv1.Output{Output: &containerv1.Output_Stdout{Stdout: []byte(greeting)}}
	if err := stream.Send(&containerv1.AttachResponse{Message: &containerv1.AttachResponse_Output{Output: out}}); err != nil {
		return err
	}
	if start.GetContainerId() == "ends" {
		return nil
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

// session is a client's session, by whatever protocol.
type session interface {
	// stdin writes and closeStdin ends the input.
	stdin(t *testing.T, data []byte)
	closeStdin(t *testing.T)
	resize(t *testing.T, text string)
	// read returns all of stdout, of stderr and of the error channel.
	read(t *testing.T) (out, errOut, outcome string)
	// drop ends the connection without a word.
	drop()
}

// spdySession speaks SPDY v4.
type spdySession struct {
	conn    httpstream.Connection
	streams map[string]httpstream.Stream
}

func dialSPDY(t *testing.T, target string, kinds ...string) *spdySession {
	t.Helper()
	return openSPDY(t, upgrade(t, target, "v4.channel.k8s.io"), kinds...)
}

// openSPDY opens the streams of a session.
func openSPDY(t *testing.T, conn httpstream.Connection, kinds ...string) *spdySession {
	t.Helper()
	s := &spdySession{conn: conn, streams: map[string]httpstream.Stream{}}
	for _, kind := range append([]string{"error"}, kinds...) {
		stream, err := conn.CreateStream(http.Header{"Streamtype": {kind}})
		if err != nil {
			t.Fatal(err)
		}
		s.streams[kind] = stream
	}
	return s
}

func (s *spdySession) write(t *testing.T, kind string, data []byte) {
	t.Helper()
	if _, err := s.streams[kind].Write(data); err != nil {
		t.Errorf("write %s: %v", kind, err)
	}
}

func (s *spdySession) stdin(t *testing.T, data []byte)  { s.write(t, "stdin", data) }
func (s *spdySession) resize(t *testing.T, text string) { s.write(t, "resize", []byte(text)) }
func (s *spdySession) closeStdin(*testing.T)            { _ = s.streams["stdin"].Close() }
func (s *spdySession) drop()                            { _ = s.conn.Close() }

func (s *spdySession) read(t *testing.T) (string, string, string) {
	t.Helper()
	texts := map[string]string{}
	for _, kind := range []string{"stdout", "stderr", "error"} {
		if stream := s.streams[kind]; stream != nil {
			text, err := io.ReadAll(stream)
			if err != nil {
				t.Errorf("read %s: %v", kind, err)
			}
			texts[kind] = string(text)
		}
	}
	return texts["stdout"], texts["stderr"], texts["error"]
}

// wsSession speaks WebSocket.
type wsSession struct {
	ws     *websocket.Conn
	base64 bool
}

func dialWebSocket(t *testing.T, target, protocol string) *wsSession {
	t.Helper()
	return dialWebSocketWith(t, &websocket.Dialer{}, target, protocol)
}

func dialWebSocketWith(t *testing.T, dialer *websocket.Dialer, target, protocol string) *wsSession {
	t.Helper()
	if protocol != "" {
		dialer.Subprotocols = []string{protocol}
	}
	ws, resp, err := dialer.DialContext(t.Context(), strings.Replace(target, "http", "ws", 1), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	t.Cleanup(func() { _ = ws.Close() })
	return &wsSession{ws: ws, base64: strings.Contains(protocol, "base64")}
}

func (s *wsSession) write(t *testing.T, channel byte, data []byte) {
	t.Helper()
	message := append([]byte{channel}, data...)
	if s.base64 {
		message = append([]byte{'0' + channel}, base64.StdEncoding.EncodeToString(data)...)
	}
	if err := s.ws.WriteMessage(websocket.BinaryMessage, message); err != nil {
		t.Errorf("write channel %d: %v", channel, err)
	}
}

func (s *wsSession) stdin(t *testing.T, data []byte) {
	for len(data) > 0 {
		n := min(len(data), 32<<10)
		s.write(t, 0, data[:n])
		data = data[n:]
	}
}
func (s *wsSession) resize(t *testing.T, text string) { s.write(t, 4, []byte(text)) }
func (s *wsSession) closeStdin(t *testing.T)          { s.write(t, 255, []byte{0}) }
func (s *wsSession) drop()                            { _ = s.ws.NetConn().Close() }

func (s *wsSession) read(t *testing.T) (string, string, string) {
	t.Helper()
	var channels [5]bytes.Buffer
	for {
		_, m, err := s.ws.ReadMessage()
		if websocket.IsCloseError(err, websocket.CloseNormalClosure) {
			break
		}
		if err != nil {
			t.Errorf("read: %v", err)
			break
		}
		channel, data := m[0], m[1:]
		if s.base64 {
			channel -= '0'
			if data, err = base64.StdEncoding.DecodeString(string(data)); err != nil {
				t.Error(err)
			}
		}
		channels[channel].Write(data)
	}
	return channels[1].String(), channels[2].String(), channels[3].String()
}

// protocols are the ways to open a session that can end the input.
func protocols() map[string]func(t *testing.T, target string, kinds ...string) session {
	return map[string]func(t *testing.T, target string, kinds ...string) session{
		"spdy": func(t *testing.T, target string, kinds ...string) session { return dialSPDY(t, target, kinds...) },
		"v5": func(t *testing.T, target string, _ ...string) session {
			return dialWebSocket(t, target, "v5.channel.k8s.io")
		},
	}
}

func (b *bench) execURL(t *testing.T, req *criv1.ExecRequest) string {
	t.Helper()
	req.ContainerId = "c"
	target, err := b.ExecURL(req)
	if err != nil {
		t.Fatal(err)
	}
	return target
}

func TestInputReachesTheCommand(t *testing.T) {
	data := make([]byte, 3<<20)
	_, _ = rand.Read(data)
	sum := sha256.Sum256(data)
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := dial(t, b.execURL(t, &criv1.ExecRequest{Cmd: []string{"sum"}, Stdin: true, Stdout: true}), "stdin", "stdout")
			s.stdin(t, data)
			s.closeStdin(t)
			out, _, outcome := s.read(t)
			if out != hex.EncodeToString(sum[:]) {
				t.Errorf("sum %q, want %x", out, sum)
			}
			if !strings.Contains(outcome, `"status":"Success"`) {
				t.Errorf("outcome %q, want success", outcome)
			}
		})
	}
}

func TestExitCodeIsDelivered(t *testing.T) {
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := dial(t, b.execURL(t, &criv1.ExecRequest{Cmd: []string{"fail"}, Stdout: true, Stderr: true}), "stdout", "stderr")
			out, errOut, outcome := s.read(t)
			if out != "out" || errOut != "err" {
				t.Errorf("output %q and %q, want out and err", out, errOut)
			}
			var st struct {
				Status, Reason string
				Details        struct {
					Causes []struct{ Reason, Message string }
				}
			}
			if err := json.Unmarshal([]byte(outcome), &st); err != nil {
				t.Fatalf("outcome %q: %v", outcome, err)
			}
			if st.Status != "Failure" || st.Reason != "NonZeroExitCode" || len(st.Details.Causes) != 1 ||
				st.Details.Causes[0].Reason != "ExitCode" || st.Details.Causes[0].Message != "7" {
				t.Errorf("outcome %s, want exit code 7", outcome)
			}
		})
	}
}

func TestFailureBeforeTheStartIsDelivered(t *testing.T) {
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			req := &criv1.ExecRequest{Cmd: []string{"missing"}, Stdin: true, Stdout: true, Tty: true}
			s := dial(t, b.execURL(t, req), "stdin", "stdout", "resize")
			for range 100 {
				// Nobody takes the sizes; the session must end all the same.
				if ws, ok := s.(*wsSession); ok {
					_ = ws.ws.WriteMessage(websocket.BinaryMessage, []byte("\x04{\"Width\":1,\"Height\":1}"))
				}
			}
			_, _, outcome := s.read(t)
			if !strings.Contains(outcome, "no such file") || !strings.Contains(outcome, "InternalError") {
				t.Errorf("outcome %q, want the reason", outcome)
			}
		})
	}
}

func TestAllOutputComesBeforeTheOutcome(t *testing.T) {
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := dial(t, b.execURL(t, &criv1.ExecRequest{Cmd: []string{"talk"}, Stdout: true}), "stdout")
			out, _, outcome := s.read(t)
			if len(out) != 2000*1000 || !strings.Contains(outcome, "Success") {
				t.Errorf("%d bytes and outcome %q, want 2000000 and success", len(out), outcome)
			}
		})
	}
}

func TestSenselessSizesAreIgnored(t *testing.T) {
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			req := &criv1.ExecRequest{Cmd: []string{"sizes"}, Stdin: true, Stdout: true, Tty: true}
			s := dial(t, b.execURL(t, req), "stdin", "stdout", "resize")
			for _, text := range []string{
				`{"Width":0,"Height":0}`, `{"Width":-5,"Height":3}`, `{"Width":70000,"Height":3}`, `"wide"`, `{nonsense`,
			} {
				s.resize(t, text+"\n")
			}
			// A size that comes in one piece with the nonsense before it is lost.
			testkit.Eventually(t, testkit.Patience, func() error {
				s.resize(t, `{"Width":80,"Height":24}`+"\n")
				if b.sized.Load() == 0 {
					return errors.New("the command has no size")
				}
				return nil
			})
			s.closeStdin(t)
			out, _, outcome := s.read(t)
			if strings.ReplaceAll(out, "80x24;", "") != "" || !strings.Contains(outcome, "Success") {
				t.Errorf("sizes %q and outcome %q, want 80x24 alone and success", out, outcome)
			}
		})
	}
}

func TestDroppedClientsLeaveNothingBehind(t *testing.T) {
	b := newBench(t)
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			for i := range 20 {
				req := &criv1.ExecRequest{Cmd: []string{"silent"}, Stdout: true, Stderr: true, Stdin: i%2 == 0}
				kinds := []string{"stdout", "stderr"}
				if req.Stdin {
					kinds = append(kinds, "stdin")
				}
				s := dial(t, b.execURL(t, req), kinds...)
				testkit.Eventually(t, testkit.Patience, func() error {
					if b.running.Load() == 0 {
						return errors.New("the command does not run yet")
					}
					return nil
				})
				s.drop()
			}
			testkit.Eventually(t, testkit.Patience, func() error {
				if n := b.running.Load(); n != 0 {
					return fmt.Errorf("%d commands still run", n)
				}
				// The connections to the stand-in differ by a few goroutines.
				if n := runtime.NumGoroutine(); n > before+10 {
					return fmt.Errorf("%d goroutines, %d before", n, before)
				}
				return nil
			})
		})
	}
}

func TestStopEndsSessions(t *testing.T) {
	b := newBench(t) // its end waits for Run, which waits for the sessions
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			dial(t, b.execURL(t, &criv1.ExecRequest{Cmd: []string{"silent"}, Stdout: true}), "stdout")
		})
	}
}

func TestAttach(t *testing.T) {
	for name, dial := range protocols() {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			// The client wants to send input, the container takes none.
			target, err := b.AttachURL(&criv1.AttachRequest{ContainerId: "ends", Stdin: true, Stdout: true}, true, false)
			if err != nil {
				t.Fatal(err)
			}
			out, _, outcome := dial(t, target, "stdin", "stdout").read(t)
			if out != "tty=true stdin=false" || !strings.Contains(outcome, "Success") {
				t.Errorf("output %q and outcome %q, want the greeting and success", out, outcome)
			}
		})
	}
}

func TestOlderWebSocketProtocols(t *testing.T) {
	for _, tt := range []struct{ protocol, outcome string }{
		{"v4.channel.k8s.io", `"NonZeroExitCode"`},
		{"v4.base64.channel.k8s.io", `"NonZeroExitCode"`},
		{"channel.k8s.io", "exit code 7"},
		{"base64.channel.k8s.io", "exit code 7"},
		{"", "exit code 7"},
	} {
		t.Run(tt.protocol, func(t *testing.T) {
			b := newBench(t)
			s := dialWebSocket(t, b.execURL(t, &criv1.ExecRequest{Cmd: []string{"fail"}, Stdout: true, Stderr: true}), tt.protocol)
			out, errOut, outcome := s.read(t)
			if out != "out" || errOut != "err" || !strings.Contains(outcome, tt.outcome) {
				t.Errorf("got %q, %q, %q; want out, err and %s", out, errOut, outcome, tt.outcome)
			}
		})
	}
}

func TestFragmentedMessages(t *testing.T) {
	b := newBench(t)
	s := dialWebSocket(t, b.execURL(t, &criv1.ExecRequest{Cmd: []string{"sum"}, Stdin: true, Stdout: true}), "v5.channel.k8s.io")
	text := []byte("\x00hello")
	for i, c := range text {
		// A frame by hand: masked with zeros, one byte each.
		first := byte(0)
		if i == 0 {
			first = websocket.BinaryMessage
		}
		if i == len(text)-1 {
			first |= 0x80
		}
		if _, err := s.ws.NetConn().Write([]byte{first, 0x81, 0, 0, 0, 0, c}); err != nil {
			t.Fatal(err)
		}
	}
	s.closeStdin(t)
	sum := sha256.Sum256([]byte("hello"))
	if out, _, _ := s.read(t); out != hex.EncodeToString(sum[:]) {
		t.Errorf("sum %q, want that of hello", out)
	}
}

func TestURLsWorkOnce(t *testing.T) {
	b := newBench(t)
	target := b.execURL(t, &criv1.ExecRequest{Cmd: []string{"fail"}, Stdout: true})
	dialSPDY(t, target, "stdout").read(t)
	for _, u := range []string{target, strings.Replace(target, "exec", "attach", 1), target + "x"} {
		if code := get(t, u, nil); code != http.StatusNotFound {
			t.Errorf("GET %s: %d, want 404", u, code)
		}
	}
}

func TestBadUpgradesAreRefused(t *testing.T) {
	for name, header := range map[string]http.Header{
		"plain":                nil,
		"unknown SPDY":         {"Connection": {"Upgrade"}, "Upgrade": {"SPDY/3.1"}, "X-Stream-Protocol-Version": {"v9"}},
		"missing upgrade":      {"X-Stream-Protocol-Version": {"v4.channel.k8s.io"}},
		"unknown WebSocket":    {"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Protocol": {"v9"}},
		"incomplete WebSocket": {"Connection": {"Upgrade"}, "Upgrade": {"websocket"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			target := b.execURL(t, &criv1.ExecRequest{Cmd: []string{"fail"}, Stdout: true})
			if code := get(t, target, header); code < 400 || code >= 500 {
				t.Errorf("status %d, want a client error", code)
			}
			if b.running.Load() != 0 {
				t.Error("the command runs")
			}
		})
	}
}

func get(t *testing.T, target string, header http.Header) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, target, nil)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(req.Header, header)
	transport := &http.Transport{DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

func TestPortForward(t *testing.T) {
	b := newBench(t)
	b.sandboxd.Forward = func(stream grpc.BidiStreamingServer[sandboxv1.PortForwardRequest, sandboxv1.PortForwardResponse], target *sandboxv1.PortForwardTarget) error {
		b.running.Add(1)
		defer b.running.Add(-1)
		switch target.GetPort() {
		case 81:
			return fmt.Errorf("connection refused: %w", errdefs.ErrUnavailable)
		case 82:
			<-stream.Context().Done()
			return stream.Context().Err()
		}
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return stream.Send(&sandboxv1.PortForwardResponse{Data: []byte("bye")})
			}
			if err != nil {
				return err
			}
			if err := stream.Send(&sandboxv1.PortForwardResponse{Data: m.GetData()}); err != nil {
				return err
			}
		}
	}
	forward := func(t *testing.T, port string) (data, failure httpstream.Stream, drop func()) {
		target, err := b.PortForwardURL(&criv1.PortForwardRequest{PodSandboxId: "sb"})
		if err != nil {
			t.Fatal(err)
		}
		conn := dialForward(t, target)
		header := http.Header{"Port": {port}, "Requestid": {"0"}, "Streamtype": {"error"}}
		if failure, err = conn.CreateStream(header); err != nil {
			t.Fatal(err)
		}
		header.Set("Streamtype", "data")
		if data, err = conn.CreateStream(header); err != nil {
			t.Fatal(err)
		}
		return data, failure, func() { _ = conn.Close() }
	}

	t.Run("echo and half close", func(t *testing.T) {
		data, failure, _ := forward(t, "80")
		if _, err := data.Write([]byte("hello ")); err != nil {
			t.Fatal(err)
		}
		_ = data.Close()
		if got, err := io.ReadAll(data); string(got) != "hello bye" {
			t.Errorf("got %q, %v; want hello bye", got, err)
		}
		if got, _ := io.ReadAll(failure); len(got) != 0 {
			t.Errorf("failure %q, want none", got)
		}
	})
	t.Run("refused", func(t *testing.T) {
		_, failure, _ := forward(t, "81")
		if got, _ := io.ReadAll(failure); !strings.Contains(string(got), "connection refused") {
			t.Errorf("failure %q, want the reason", got)
		}
	})
	t.Run("dropped", func(t *testing.T) {
		_, _, drop := forward(t, "82")
		testkit.Eventually(t, testkit.Patience, func() error {
			if b.running.Load() != 1 {
				return errors.New("not forwarded yet")
			}
			return nil
		})
		drop()
		testkit.Eventually(t, testkit.Patience, func() error {
			if b.running.Load() != 0 {
				return errors.New("still forwarded")
			}
			return nil
		})
	})
}

func dialForward(t *testing.T, target string) httpstream.Connection {
	t.Helper()
	return upgrade(t, target, "portforward.k8s.io")
}

// upgrade opens a SPDY connection.
func upgrade(t *testing.T, target, protocol string) httpstream.Connection {
	t.Helper()
	rt, err := spdy.NewRoundTripper(nil)
	if err != nil {
		t.Fatal(err)
	}
	return upgradeWith(t, rt, target, protocol)
}

func upgradeWith(t *testing.T, rt *spdy.SpdyRoundTripper, target, protocol string) httpstream.Connection {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, target, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(httpstream.HeaderProtocolVersion, protocol)
	resp, err := rt.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := rt.NewConnection(resp)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
