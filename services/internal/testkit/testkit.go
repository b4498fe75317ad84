// Package testkit holds what tests of several services need: telemetry that records
// spans, an RPC server in memory, an event bus in the process, golden files,
// certificates and a poll.
// Only test files import it. Nothing in it is a mock: the servers are the real ones.
package testkit

import (
	"bytes"
	"context"
	"flag"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

var update = flag.Bool("update", false, "write golden files instead of comparing with them")

// Buffer is what was written to it, by any number of writers, and may be read meanwhile. The
// zero value is empty.
type Buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer; it never fails.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// String returns all that was written until now.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Spans are the ended spans of one test.
type Spans struct{ *tracetest.SpanRecorder }

// Named returns the ended spans with that name.
func (s Spans) Named(name string) []sdktrace.ReadOnlySpan {
	var found []sdktrace.ReadOnlySpan
	for _, span := range s.Ended() {
		if span.Name() == name {
			found = append(found, span)
		}
	}
	return found
}

// Telemetry returns telemetry that logs everything to the test and keeps all spans.
func Telemetry(tb testing.TB) (*telemetry.Telemetry, Spans) {
	tb.Helper()
	return TelemetryTo(tb, testWriter(tb))
}

// TelemetryTo is Telemetry with the log, in JSON, written to w.
func TelemetryTo(tb testing.TB, w io.Writer) (*telemetry.Telemetry, Spans) {
	tb.Helper()
	spans := Spans{tracetest.NewSpanRecorder()}
	tel, err := telemetry.New(tb.Context(), telemetry.Config{
		Service:        "test",
		Log:            telemetry.LogConfig{Level: "debug", Format: "json"},
		Trace:          telemetry.DefaultTraceConfig(),
		SpanProcessors: []sdktrace.SpanProcessor{spans.SpanRecorder},
	}, w)
	if err != nil {
		tb.Fatal(err)
	}
	return tel, spans
}

// logWriter forwards lines to the log of a test until the test is over; writing to it
// later would panic.
type logWriter struct {
	tb testing.TB

	// mu guards over.
	mu   sync.Mutex
	over bool
}

func testWriter(tb testing.TB) *logWriter {
	tb.Helper()
	w := &logWriter{tb: tb}
	tb.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.over = true
	})
	return w
}

func (w *logWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.tb.Logf("%s", trimNewline(p))
	}
	return len(p), nil
}

func trimNewline(p []byte) []byte {
	if n := len(p); n > 0 && p[n-1] == '\n' {
		return p[:n-1]
	}
	return p
}

// GRPC serves the registrations in memory, with all that rpc.NewServer puts around them
// except the check of peers, and returns a connection to them.
func GRPC(tb testing.TB, tel *telemetry.Telemetry, regs ...rpc.Registration) *grpc.ClientConn {
	tb.Helper()
	const size = 1 << 20
	srv, err := rpc.NewServer(rpc.DefaultServerConfig("/in/memory.sock"), tel, append(regs, rpc.WithoutPeerCheck())...)
	if err != nil {
		tb.Fatal(err)
	}
	lis := bufconn.Listen(size)
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ctx, lis) }()
	conn, err := rpc.Dial(rpc.DefaultClientConfig("/in/memory.sock"), tel,
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		cancel()
		if err := conn.Close(); err != nil {
			tb.Error(err)
		}
		if err := <-served; err != nil {
			tb.Error(err)
		}
	})
	return conn
}

// Golden compares got with the file testdata/<name>, or writes it with -update.
func Golden(tb testing.TB, name string, got []byte) {
	tb.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			tb.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o600); err != nil {
			tb.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		tb.Errorf("%s differs (-want +got), write it with -update if that is meant:\n%s", path, diff)
	}
}

// Lacks skips a test because this machine has not got what. Where all tests must run,
// which CRISP_TEST_ALL=1 says (`make test-e2e` sets it), it fails the test instead.
func Lacks(tb testing.TB, what string) {
	tb.Helper()
	if os.Getenv("CRISP_TEST_ALL") == "1" {
		tb.Fatal("CRISP_TEST_ALL=1, and there is no " + what)
	}
	tb.Skip("there is no " + what)
}

// NeedRoot lets a test run by root only; see Lacks.
func NeedRoot(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		Lacks(tb, "root")
	}
}
