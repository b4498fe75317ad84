package ttrpcx_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/internal/ttrpcx"
)

// connect serves one method on a real socket and returns a client.
func connect(t *testing.T, out *bytes.Buffer, method func(ctx context.Context) error) (*ttrpc.Client, testkit.Spans) {
	t.Helper()
	tel, spans := testkit.TelemetryTo(t, out)
	srv, err := ttrpc.NewServer(ttrpcx.ServerOptions(tel)...)
	if err != nil {
		t.Fatal(err)
	}
	srv.RegisterService("test.Service", &ttrpc.ServiceDesc{Methods: map[string]ttrpc.Method{
		"Do": func(ctx context.Context, unmarshal func(any) error) (any, error) {
			if err := unmarshal(&emptypb.Empty{}); err != nil {
				return nil, err
			}
			return &emptypb.Empty{}, method(ctx)
		},
	}})
	path := filepath.Join(t.TempDir(), "t.sock")
	lis, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(t.Context(), lis) }()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	client := ttrpc.NewClient(conn, ttrpcx.ClientOptions(tel)...)
	t.Cleanup(func() {
		_ = client.Close()
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, ttrpc.ErrServerClosed) {
			t.Error(err)
		}
	})
	return client, spans
}

func do(ctx context.Context, c *ttrpc.Client) error {
	return ttrpcx.Error(c.Call(ctx, "test.Service", "Do", &emptypb.Empty{}, &emptypb.Empty{}))
}

func TestErrorsKeepTheirSentinels(t *testing.T) {
	t.Parallel()
	for _, want := range []error{nil, errdefs.ErrNotFound, errdefs.ErrInvalidArgument, errdefs.ErrUnavailable} {
		client, _ := connect(t, new(bytes.Buffer), func(context.Context) error {
			if want == nil {
				return nil
			}
			return fmt.Errorf("thing: %w", want)
		})
		if err := do(t.Context(), client); !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
}

func TestPanicBecomesInternal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	client, _ := connect(t, &out, func(context.Context) error { panic("secret") })
	err := do(t.Context(), client)
	if !errors.Is(err, errdefs.ErrInternal) || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v", err)
	}
	// The client's own line comes last, so the buffer is no longer written.
	if log := out.String(); !strings.Contains(log, "ttrpcx_test.go") || !strings.Contains(log, `"code":"Internal"`) {
		t.Errorf("log is %s", log)
	}
}

func TestTraceGoesOn(t *testing.T) {
	t.Parallel()
	client, spans := connect(t, new(bytes.Buffer), func(context.Context) error { return nil })
	if err := do(t.Context(), client); err != nil {
		t.Fatal(err)
	}
	got := spans.Named("test.Service/Do")
	if len(got) != 2 || got[0].SpanContext().TraceID() != got[1].SpanContext().TraceID() {
		t.Errorf("spans are %v", got)
	}
}

func TestClosedConnectionIsUnavailable(t *testing.T) {
	t.Parallel()
	client, _ := connect(t, new(bytes.Buffer), func(context.Context) error { return nil })
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if err := do(t.Context(), client); !errors.Is(err, errdefs.ErrUnavailable) || !errors.Is(err, ttrpc.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
