package lane_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	testv1 "google.golang.org/grpc/interop/grpc_testing"

	lanev1 "github.com/crisp-cri/crisp/proto/gen/crisp/lane/v1"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type unary = func(ctx context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error)

// service is one whose unary call does what the test wants.
type service struct {
	testv1.UnimplementedTestServiceServer

	call unary
}

func (s service) UnaryCall(ctx context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
	return s.call(ctx, req)
}

// serve starts a server at socket; stop ends it and returns when it has.
func serve(t *testing.T, socket string, call unary, regs ...rpc.Registration) (stop func(), spans testkit.Spans) {
	t.Helper()
	tel, spans := testkit.Telemetry(t)
	srv, err := rpc.NewServer(rpc.DefaultServerConfig(socket), tel, append(regs, rpc.Service(&testv1.TestService_ServiceDesc, service{call: call}))...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- srv.Part("rpc").Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		done <- nil
	}
	t.Cleanup(stop)
	return stop, spans
}

func client(t *testing.T, socket string) (testv1.TestServiceClient, *grpc.ClientConn) {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	conn, err := rpc.Dial(rpc.DefaultClientConfig(socket), tel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return testv1.NewTestServiceClient(rpc.Lane(conn)), conn
}

func socket(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "s.sock")
}

func TestErrorsKeepTheirSentinelsAndPanicsEndOneCallOnly(t *testing.T) {
	t.Parallel()
	path := socket(t)
	wants := map[string]error{"nil": nil, "missing": errdefs.ErrNotFound, "bad": errdefs.ErrInvalidArgument, "away": errdefs.ErrUnavailable}
	serve(t, path, func(_ context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		name := string(req.GetPayload().GetBody())
		if name == "panic" {
			panic("on purpose")
		}
		if err := wants[name]; err != nil {
			return nil, fmt.Errorf("object %q: %w", name, err)
		}
		return &testv1.SimpleResponse{Username: name}, nil
	}, rpc.WithLanes())
	c, _ := client(t, path)
	call := func(name string) (*testv1.SimpleResponse, error) {
		return c.UnaryCall(t.Context(), &testv1.SimpleRequest{Payload: &testv1.Payload{Body: []byte(name)}})
	}
	if _, err := call("panic"); !errdefs.IsInternal(err) {
		t.Errorf("panic: %v", err)
	}
	for name, want := range wants {
		resp, err := call(name)
		if !errors.Is(err, want) || want == nil && (err != nil || resp.GetUsername() != name) {
			t.Errorf("%s: %v, %v", name, resp, err)
		}
	}
}

// A slow call holds up no other; its end of patience reaches the handler.
func TestCallsAreIndependent(t *testing.T) {
	t.Parallel()
	path := socket(t)
	begun, gone := make(chan time.Time, 1), make(chan error, 1)
	serve(t, path, func(ctx context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		if req.GetResponseSize() == 0 {
			return &testv1.SimpleResponse{}, nil
		}
		deadline, _ := ctx.Deadline()
		begun <- deadline
		<-ctx.Done()
		gone <- ctx.Err()
		return nil, ctx.Err()
	}, rpc.WithLanes())
	c, _ := client(t, path)
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	slow := make(chan error, 1)
	go func() {
		_, err := c.UnaryCall(ctx, &testv1.SimpleRequest{ResponseSize: 1})
		slow <- err
	}()
	if left := time.Until(<-begun); left < 50*time.Minute || left > time.Hour {
		t.Errorf("the handler has %v, the caller an hour", left)
	}
	if _, err := c.UnaryCall(t.Context(), &testv1.SimpleRequest{}); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-slow; !errors.Is(err, context.Canceled) {
		t.Errorf("caller got %v", err)
	}
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("handler got %v", err)
	}
}

// A server that stops answers what it has begun; the next one is found.
func TestStopAndRestart(t *testing.T) {
	t.Parallel()
	path := socket(t)
	begun, finish := make(chan struct{}), make(chan struct{})
	stop, _ := serve(t, path, func(_ context.Context, req *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		if req.GetResponseSize() > 0 {
			return &testv1.SimpleResponse{}, nil
		}
		close(begun)
		<-finish
		return &testv1.SimpleResponse{Username: "old"}, nil
	}, rpc.WithLanes())
	c, _ := client(t, path)
	type outcome struct {
		resp *testv1.SimpleResponse
		err  error
	}
	old := make(chan outcome, 1)
	go func() {
		resp, err := c.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		old <- outcome{resp, err}
	}()
	<-begun
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stop()
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if _, err := c.UnaryCall(ctx, &testv1.SimpleRequest{ResponseSize: 1}); !errdefs.IsUnavailable(err) {
			return fmt.Errorf("a stopping server takes a call: %w", cmp.Or(err, errors.New("it was answered")))
		}
		return nil
	})
	close(finish)
	if o := <-old; o.err != nil || o.resp.GetUsername() != "old" {
		t.Errorf("begun before the stop: %v, %v", o.resp, o.err)
	}
	<-stopped
	serve(t, path, func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		return &testv1.SimpleResponse{Username: "new"}, nil
	}, rpc.WithLanes())
	testkit.Eventually(t, testkit.Patience, func() error {
		resp, err := c.UnaryCall(t.Context(), &testv1.SimpleRequest{})
		if err == nil && resp.GetUsername() != "new" {
			return fmt.Errorf("answer of %q", resp.GetUsername())
		}
		return err
	})
}

// A server without lanes gets ordinary calls.
func TestServerWithoutLanes(t *testing.T) {
	t.Parallel()
	path := socket(t)
	serve(t, path, func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		return nil, errdefs.ErrAlreadyExists
	})
	c, _ := client(t, path)
	for range 3 {
		if _, err := c.UnaryCall(t.Context(), &testv1.SimpleRequest{}); !errdefs.IsAlreadyExists(err) {
			t.Errorf("got %v", err)
		}
	}
}

// The handler's spans are in the caller's trace.
func TestTraceGoesOn(t *testing.T) {
	t.Parallel()
	path := socket(t)
	_, spans := serve(t, path, func(context.Context, *testv1.SimpleRequest) (*testv1.SimpleResponse, error) {
		return &testv1.SimpleResponse{}, nil
	}, rpc.WithLanes())
	c, _ := client(t, path)
	tel, _ := testkit.Telemetry(t)
	ctx, span := tel.Tracer.Start(t.Context(), "caller")
	if _, err := c.UnaryCall(ctx, &testv1.SimpleRequest{}); err != nil {
		t.Fatal(err)
	}
	span.End()
	for _, s := range spans.Ended() {
		if s.Name() == "grpc.testing.TestService/UnaryCall" && s.Parent().SpanID() == span.SpanContext().SpanID() {
			return
		}
	}
	t.Errorf("no span below %v", span.SpanContext().SpanID())
}

// deaf opens lanes and reads nothing from them.
type deaf struct {
	lanev1.UnimplementedLaneServiceServer
}

func (deaf) Open(stream grpc.BidiStreamingServer[lanev1.OpenRequest, lanev1.OpenResponse]) error {
	<-stream.Context().Done()
	return stream.Context().Err()
}

// A server that reads nothing holds no caller beyond its time, though all that a connection holds
// is full, and in the end its lane is given up.
func TestServerThatReadsNothing(t *testing.T) {
	t.Parallel()
	path := socket(t)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	lanev1.RegisterLaneServiceServer(srv, deaf{})
	var serving sync.WaitGroup
	serving.Go(func() { _ = srv.Serve(listener) })
	t.Cleanup(serving.Wait)
	t.Cleanup(srv.Stop)
	c, _ := client(t, path)
	big := &testv1.SimpleRequest{Payload: &testv1.Payload{Body: make([]byte, 64<<10)}}
	results := make(chan error, 20)
	for i := range cap(results) {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			if i == 0 {
				ctx, cancel = context.WithCancel(t.Context())
			}
			defer cancel()
			_, err := c.UnaryCall(ctx, big)
			results <- err
		}()
	}
	broken := 0
	for range cap(results) {
		switch err := testkit.Receive(t, results); {
		case errdefs.IsUnavailable(err):
			broken++
		case !errors.Is(err, context.DeadlineExceeded):
			t.Errorf("got %v", err)
		}
	}
	if broken == 0 {
		t.Error("the lane is not given up")
	}
}
