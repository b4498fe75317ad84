package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	testv1 "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// handler is a service whose unary and streaming calls do what the test wants.
type handler struct {
	testv1.UnimplementedTestServiceServer

	unary  func(ctx context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error)
	stream func(ss grpc.ServerStreamingServer[testv1.StreamingOutputCallResponse]) error
}

func (h *handler) UnaryCall(ctx context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
	return h.unary(ctx, req)
}

func (h *handler) StreamingOutputCall(_ *testv1.StreamingOutputCallRequest, ss grpc.ServerStreamingServer[testv1.StreamingOutputCallResponse]) error {
	return h.stream(ss)
}

// running is a server on a real socket.
type running struct {
	cfg    rpc.ServerConfig
	tel    *telemetry.Telemetry
	spans  testkit.Spans
	log    *testkit.Buffer
	cancel context.CancelFunc
	done   chan error
}

func serverConfig(t *testing.T) rpc.ServerConfig {
	t.Helper()
	return rpc.DefaultServerConfig(filepath.Join(t.TempDir(), "s.sock"))
}

func start(t *testing.T, cfg rpc.ServerConfig, h *handler, regs ...rpc.Registration) *running {
	t.Helper()
	r := &running{cfg: cfg, log: new(testkit.Buffer), done: make(chan error, 1)}
	r.tel, r.spans = testkit.TelemetryTo(t, r.log)
	srv, err := rpc.NewServer(cfg, r.tel, append(regs, rpc.Service(&testv1.TestService_ServiceDesc, h))...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	ready := make(chan struct{})
	go func() { r.done <- srv.Part("rpc").Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-r.done:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *running) stop() error {
	r.cancel()
	err := <-r.done
	r.done <- nil
	return err
}

func dial(t *testing.T, socket string, tel *telemetry.Telemetry, opts ...grpc.DialOption) testv1.TestServiceClient {
	t.Helper()
	conn, err := rpc.Dial(rpc.DefaultClientConfig(socket), tel, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return testv1.NewTestServiceClient(conn)
}

func fails(err error) *handler {
	return &handler{
		unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) { return nil, err },
		stream: func(ss grpc.ServerStreamingServer[testv1.StreamingOutputCallResponse]) error {
			if sendErr := ss.Send(&testv1.StreamingOutputCallResponse{}); sendErr != nil {
				return sendErr
			}
			return err
		},
	}
}

// streamEnd reads a stream to its end and returns the number of messages and the error.
func streamEnd(ctx context.Context, client testv1.TestServiceClient) (int, error) {
	stream, err := client.StreamingOutputCall(ctx, &testv1.StreamingOutputCallRequest{})
	if err != nil {
		return 0, err
	}
	for n := 0; ; n++ {
		if _, err := stream.Recv(); err != nil {
			if errors.Is(err, io.EOF) {
				return n, nil
			}
			return n, err
		}
	}
}

func TestErrorsKeepTheirSentinels(t *testing.T) {
	t.Parallel()
	for _, want := range []error{
		errdefs.ErrInvalidArgument, errdefs.ErrNotFound, errdefs.ErrAlreadyExists, errdefs.ErrPermissionDenied,
		errdefs.ErrResourceExhausted, errdefs.ErrFailedPrecondition, errdefs.ErrAborted, errdefs.ErrOutOfRange,
		errdefs.ErrNotImplemented, errdefs.ErrInternal, errdefs.ErrUnavailable, errdefs.ErrDataLoss,
		errdefs.ErrUnauthenticated, errdefs.ErrUnknown, errdefs.ErrConflict, context.Canceled, context.DeadlineExceeded,
	} {
		t.Run(want.Error(), func(t *testing.T) {
			t.Parallel()
			tel, _ := testkit.Telemetry(t)
			conn := testkit.GRPC(t, tel, rpc.Service(&testv1.TestService_ServiceDesc, fails(fmt.Errorf("thing %q: %w", "x", want))))
			client := testv1.NewTestServiceClient(conn)
			_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
			if !errors.Is(err, want) || !strings.Contains(err.Error(), `thing "x"`) || strings.Contains(err.Error(), "rpc error") {
				t.Errorf("unary: got %v", err)
			}
			n, err := streamEnd(t.Context(), client)
			if n != 1 || !errors.Is(err, want) || strings.Contains(err.Error(), "rpc error") {
				t.Errorf("stream: got %d messages and %v", n, err)
			}
		})
	}
	tel, _ := testkit.Telemetry(t)
	conn := testkit.GRPC(t, tel, rpc.Service(&testv1.TestService_ServiceDesc, fails(nil)))
	if n, err := streamEnd(t.Context(), testv1.NewTestServiceClient(conn)); n != 1 || err != nil {
		t.Errorf("the end of a stream: got %d messages and %v", n, err)
	}
}

func TestPanicBecomesInternal(t *testing.T) {
	t.Parallel()
	h := &handler{
		unary:  func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) { panic("secret") },
		stream: func(grpc.ServerStreamingServer[testv1.StreamingOutputCallResponse]) error { panic("secret") },
	}
	r := start(t, serverConfig(t), h)
	client := dial(t, r.cfg.Socket.Path, r.tel)
	_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
	if !errors.Is(err, errdefs.ErrInternal) || strings.Contains(err.Error(), "secret") {
		t.Errorf("unary: got %v", err)
	}
	if _, err := streamEnd(t.Context(), client); !errors.Is(err, errdefs.ErrInternal) {
		t.Errorf("stream: got %v", err)
	}
	log := r.log.String()
	for _, want := range []string{`"panic":"secret"`, "rpc_test.go", `"grpc_code":"Internal"`} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
	}
	got := metric(t, r.tel, "crisp_rpc_panics_total")
	if got != 2 {
		t.Errorf("%v panics were counted, want 2", got)
	}
	if got := metric(t, r.tel, "grpc_server_handled_total", "Internal"); got != 2 {
		t.Errorf("%v failed calls were counted, want 2", got)
	}
}

// metric sums the counters of that name that carry all the label values.
func metric(t *testing.T, tel *telemetry.Telemetry, name string, values ...string) float64 {
	t.Helper()
	families, err := tel.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var sum float64
	for _, f := range families {
		for _, m := range f.GetMetric() {
			found := 0
			for _, l := range m.GetLabel() {
				for _, v := range values {
					if l.GetValue() == v {
						found++
					}
				}
			}
			if f.GetName() == name && found == len(values) {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

func TestTraceAndLogSpanTheCall(t *testing.T) {
	t.Parallel()
	h := &handler{unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		return &testv1.SimpleResponse{}, nil
	}}
	r := start(t, serverConfig(t), h)
	client := dial(t, r.cfg.Socket.Path, r.tel)
	ctx, parent := r.tel.Tracer.Start(t.Context(), "parent")
	if _, err := client.UnaryCall(ctx, &testv1.SimpleRequest{}); err != nil {
		t.Fatal(err)
	}
	parent.End()
	const name = "grpc.testing.TestService/UnaryCall"
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := len(r.spans.Named(name)); n != 2 {
			return fmt.Errorf("%d spans, want one of each side", n)
		}
		return nil
	})
	for _, s := range r.spans.Named(name) {
		if s.SpanContext().TraceID() != parent.SpanContext().TraceID() {
			t.Errorf("%v is in another trace", s.SpanKind())
		}
	}
	id := parent.SpanContext().TraceID().String()
	for line := range strings.Lines(r.log.String()) {
		if strings.Contains(line, `"msg":"rpc finished call"`) && !strings.Contains(line, id) {
			t.Errorf("no trace id in %s", line)
		}
	}
	if !strings.Contains(r.log.String(), `"level":"DEBUG","msg":"rpc finished call"`) {
		t.Errorf("a call that succeeds is not logged at debug:\n%s", r.log.String())
	}
}

func TestDeadlineFloor(t *testing.T) {
	t.Parallel()
	left := make(chan time.Duration, 1)
	h := &handler{unary: func(ctx context.Context, _ *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		deadline, _ := ctx.Deadline()
		select {
		case left <- time.Until(deadline):
		default:
		}
		return &testv1.SimpleResponse{}, nil
	}}
	strict, open := start(t, serverConfig(t), h), start(t, serverConfig(t), h, rpc.WithoutDeadlineFloor())
	clients := map[*running]testv1.TestServiceClient{strict: dial(t, strict.cfg.Socket.Path, strict.tel), open: dial(t, open.cfg.Socket.Path, open.tel)}
	call := func(r *running, limit time.Duration) error {
		_, err := clients[r].UnaryCall(t.Context(), &testv1.SimpleRequest{}, rpc.WithTimeout(limit))
		return err
	}
	if err := call(strict, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	if d := <-left; d > 10*time.Second-20*time.Millisecond {
		t.Errorf("no time is kept back: %v are left", d)
	}
	// The refusal of the server, not the deadline itself, must end the call; the machine may be too slow for that.
	testkit.Eventually(t, testkit.Patience, func() error {
		err := call(strict, 90*time.Millisecond)
		if err == nil {
			t.Fatal("a late call was made")
		}
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "not begun") {
			return fmt.Errorf("a late call: got %w", err)
		}
		return nil
	})
	testkit.Eventually(t, testkit.Patience, func() error { return call(open, 90*time.Millisecond) })
}

func TestDefaultDeadline(t *testing.T) {
	t.Parallel()
	left := make(chan time.Duration, 1)
	h := &handler{unary: func(ctx context.Context, _ *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		if deadline, ok := ctx.Deadline(); ok {
			left <- time.Until(deadline)
		} else {
			left <- 0
		}
		return &testv1.SimpleResponse{}, nil
	}}
	r := start(t, serverConfig(t), h)
	client := dial(t, r.cfg.Socket.Path, r.tel)
	bounded, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	const lag = 20 * time.Second // of the machine, less than any two of the limits differ
	for name, tc := range map[string]struct {
		ctx  context.Context
		opts []grpc.CallOption
		want time.Duration
	}{
		"default":                {t.Context(), nil, 30 * time.Second},
		"of the context":         {bounded, nil, 90 * time.Second},
		"of the call":            {t.Context(), []grpc.CallOption{rpc.WithTimeout(60 * time.Second)}, 60 * time.Second},
		"earlier of the call":    {bounded, []grpc.CallOption{rpc.WithTimeout(60 * time.Second)}, 60 * time.Second},
		"earlier of the context": {bounded, []grpc.CallOption{rpc.WithTimeout(2 * time.Hour)}, 90 * time.Second},
		"none":                   {t.Context(), []grpc.CallOption{rpc.WithTimeout(0)}, 0},
	} {
		if _, err := client.UnaryCall(tc.ctx, &testv1.SimpleRequest{}, tc.opts...); err != nil {
			t.Fatal(err)
		}
		if got := <-left; got > tc.want || got < tc.want-lag {
			t.Errorf("%s: %v are left, want %v", name, got, tc.want)
		}
	}
}

func TestPeers(t *testing.T) {
	t.Parallel()
	h := &handler{unary: func(ctx context.Context, _ *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		p, ok := rpc.PeerFromContext(ctx)
		if !ok {
			return nil, errors.New("no peer")
		}
		return &testv1.SimpleResponse{Username: fmt.Sprint(p.UID, " ", p.PID)}, nil
	}}
	r := start(t, serverConfig(t), h)
	resp, err := dial(t, r.cfg.Socket.Path, r.tel).UnaryCall(t.Context(), &testv1.SimpleRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprint(os.Getuid(), " ", os.Getpid()); resp.GetUsername() != want {
		t.Errorf("peer is %s, want %s", resp.GetUsername(), want)
	}
	// In memory there is no peer, so a server that checks refuses.
	tel, _ := testkit.Telemetry(t)
	conn := testkit.GRPC(t, tel, rpc.Service(&testv1.TestService_ServiceDesc, h))
	if _, err := testv1.NewTestServiceClient(conn).UnaryCall(t.Context(), &testv1.SimpleRequest{}); err == nil {
		t.Error("a connection in memory has a peer")
	}
}

func TestLargeMessages(t *testing.T) {
	t.Parallel()
	h := &handler{unary: func(_ context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		return &testv1.SimpleResponse{Payload: req.GetPayload()}, nil
	}}
	r := start(t, serverConfig(t), h)
	client := dial(t, r.cfg.Socket.Path, r.tel)
	send := func(size config.ByteSize) error {
		body := make([]byte, size)
		resp, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{Payload: &testv1.Payload{Body: body}})
		if err == nil && len(resp.GetPayload().GetBody()) != len(body) {
			t.Errorf("%d bytes came back", len(resp.GetPayload().GetBody()))
		}
		return err
	}
	if err := send(20 * config.MiB); err != nil {
		t.Error(err)
	}
	if err := send(33 * config.MiB); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("too large: got %v", err)
	}
}

func TestClientWaitsForServer(t *testing.T) {
	t.Parallel()
	cfg := serverConfig(t)
	h := &handler{unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		return &testv1.SimpleResponse{}, nil
	}}
	tel, _ := testkit.Telemetry(t)
	client := dial(t, cfg.Socket.Path, tel)
	_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{}, rpc.WithTimeout(200*time.Millisecond))
	if !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("without a server: got %v, want unavailable", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		done <- err
	}()
	time.Sleep(300 * time.Millisecond)
	first := start(t, cfg, h)
	if err := <-done; err != nil {
		t.Fatalf("the call did not wait: %v", err)
	}
	for range 3 {
		if err := first.stop(); err != nil {
			t.Fatal(err)
		}
		first = start(t, cfg, h)
		began := time.Now()
		if _, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{}); err != nil {
			t.Fatalf("after a restart: %v", err)
		}
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("the restarted server was found only after %v", took)
		}
	}
}

func TestStopEndsStreamsAndDrainsCalls(t *testing.T) {
	t.Parallel()
	entered, streaming, release := make(chan struct{}), make(chan struct{}), make(chan struct{})
	h := &handler{
		unary: func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
			close(entered)
			<-release
			return &testv1.SimpleResponse{Username: "drained"}, nil
		},
		stream: func(ss grpc.ServerStreamingServer[testv1.StreamingOutputCallResponse]) error {
			if err := ss.Send(&testv1.StreamingOutputCallResponse{}); err != nil {
				return err
			}
			close(streaming)
			<-ss.Context().Done()
			return ss.Context().Err()
		},
	}
	cfg := serverConfig(t)
	cfg.DrainTimeout = config.Duration(testkit.Patience)
	r := start(t, cfg, h)
	client := dial(t, r.cfg.Socket.Path, r.tel)
	streamErr, unaryErr := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := streamEnd(t.Context(), client)
		streamErr <- err
	}()
	go func() {
		resp, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		if err == nil && resp.GetUsername() != "drained" {
			err = errors.New("wrong answer")
		}
		unaryErr <- err
	}()
	<-entered
	<-streaming
	r.cancel()
	if err := <-streamErr; !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("stream: got %v, want unavailable", err)
	}
	close(release)
	if err := <-unaryErr; err != nil {
		t.Errorf("the running call was not drained: %v", err)
	}
}

func TestStopCutsOffAfterDrainTimeout(t *testing.T) {
	t.Parallel()
	cfg := serverConfig(t)
	cfg.DrainTimeout = config.Duration(100 * time.Millisecond) // a call has half a minute
	entered := make(chan struct{})
	h := &handler{unary: func(ctx context.Context, _ *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		close(entered)
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	r := start(t, cfg, h)
	client := dial(t, cfg.Socket.Path, r.tel)
	done := make(chan error, 1)
	go func() {
		_, err := client.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		done <- err
	}()
	<-entered
	began := time.Now()
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the stop took %v", took)
	}
	if err := <-done; err == nil {
		t.Error("the call that was cut off succeeded")
	}
}

func TestHealthAndForeignClients(t *testing.T) {
	t.Parallel()
	r := start(t, serverConfig(t), fails(fmt.Errorf("x: %w", errdefs.ErrNotFound)))
	// A client that is not ours sees plain gRPC.
	conn, err := grpc.NewClient("unix:"+r.cfg.Socket.Path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	for _, name := range []string{"", "grpc.testing.TestService"} {
		resp, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{Service: name})
		if err != nil || resp.GetStatus() != healthv1.HealthCheckResponse_SERVING {
			t.Errorf("health of %q: got %v, %v", name, resp.GetStatus(), err)
		}
	}
	if n := len(r.spans.Ended()); n != 0 {
		t.Errorf("health checks made %d spans", n)
	}
	_, err = testv1.NewTestServiceClient(conn).UnaryCall(t.Context(), &testv1.SimpleRequest{})
	if status.Code(err) != codes.NotFound {
		t.Errorf("got %v, want the code NotFound", err)
	}
}

func TestConfigValidate(t *testing.T) {
	t.Parallel()
	bad := rpc.DefaultServerConfig("relative")
	bad.MaxMessage = 5
	var lines []string
	for line := range strings.Lines(bad.Validate().Error()) {
		lines = append(lines, strings.SplitN(line, " ", 2)[0])
	}
	if diff := cmp.Diff([]string{"socket.path:", "max_message:"}, lines); diff != "" {
		t.Error(diff)
	}
	if err := (rpc.ClientConfig{Socket: "relative"}).Validate(); err == nil {
		t.Error("a relative path was accepted")
	}
	if err := rpc.DefaultServerConfig("/x").Validate(); err != nil {
		t.Error(err)
	}
}
