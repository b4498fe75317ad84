package telemetry_test

import (
	"bytes"
	"context"
	"net"
	"testing"
	"time"

	collectorv1 "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// collector is a trace collector that hands the requests to the test.
type collector struct {
	collectorv1.UnimplementedTraceServiceServer

	got chan *collectorv1.ExportTraceServiceRequest
}

func (c *collector) Export(_ context.Context, req *collectorv1.ExportTraceServiceRequest) (*collectorv1.ExportTraceServiceResponse, error) {
	c.got <- req
	return &collectorv1.ExportTraceServiceResponse{}, nil
}

func TestSpansAreExportedWhereTheEnvironmentSays(t *testing.T) {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &collector{got: make(chan *collectorv1.ExportTraceServiceRequest, 1)}
	srv := grpc.NewServer()
	collectorv1.RegisterTraceServiceServer(srv, c)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(lis) }()
	defer func() {
		srv.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+lis.Addr().String())
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "svc", Trace: telemetry.DefaultTraceConfig()}, new(bytes.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	_, span := tel.Tracer.Start(t.Context(), "step")
	span.End()
	// The stop of the part, not the batch timeout, must send the span.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := tel.Part().Run(ctx, func() {}); err != nil {
		t.Fatal(err)
	}
	select {
	case req := <-c.got:
		r := req.GetResourceSpans()[0]
		names := map[string]string{}
		for _, a := range r.GetResource().GetAttributes() {
			names[a.GetKey()] = a.GetValue().GetStringValue()
		}
		if names["service.name"] != "svc" || r.GetScopeSpans()[0].GetSpans()[0].GetName() != "step" {
			t.Errorf("got %v", req)
		}
	case <-time.After(time.Minute):
		t.Fatal("no span came")
	}
}
