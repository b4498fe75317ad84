package telemetry_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/propagation"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

func newTelemetry(t *testing.T, out *bytes.Buffer) *telemetry.Telemetry {
	t.Helper()
	tel, err := telemetry.New(t.Context(), telemetry.Config{
		Service: "svc", Log: telemetry.LogConfig{Level: "info", Format: "json"}, Trace: telemetry.DefaultTraceConfig(),
	}, out)
	if err != nil {
		t.Fatal(err)
	}
	return tel
}

func TestLogCarriesTheSpan(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	tel := newTelemetry(t, &out)
	ctx, span := tel.Tracer.Start(t.Context(), "step")
	tel.Log.With(slog.String("k", "v")).InfoContext(ctx, "hello")
	span.End()
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatal(err)
	}
	sc := span.SpanContext()
	if !sc.IsValid() {
		t.Fatal("without an exporter there is no valid span context")
	}
	for key, want := range map[string]string{
		"trace_id": sc.TraceID().String(), "span_id": sc.SpanID().String(), "service": "svc", "k": "v",
	} {
		if line[key] != want {
			t.Errorf("%s is %v, want %s", key, line[key], want)
		}
	}
}

func TestTraceGoesOnWithoutExporter(t *testing.T) {
	t.Parallel()
	tel := newTelemetry(t, new(bytes.Buffer))
	in := propagation.MapCarrier{"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01", "baggage": "a=b"}
	ctx, span := tel.Tracer.Start(tel.Propagator.Extract(t.Context(), in), "step")
	defer span.End()
	out := propagation.MapCarrier{}
	tel.Propagator.Inject(ctx, out)
	if got := out["traceparent"]; !strings.HasPrefix(got, "00-0123456789abcdef0123456789abcdef-") || got == in["traceparent"] {
		t.Errorf("traceparent is %q", got)
	}
	if out["baggage"] != "a=b" {
		t.Errorf("baggage is %q", out["baggage"])
	}
}

func TestLevelCanChange(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	tel := newTelemetry(t, &out)
	tel.Log.DebugContext(t.Context(), "one")
	if err := tel.SetLevel("debug"); err != nil {
		t.Fatal(err)
	}
	tel.Log.DebugContext(t.Context(), "two")
	if got := out.String(); strings.Contains(got, "one") || !strings.Contains(got, "two") {
		t.Errorf("log is %q", got)
	}
	if tel.SetLevel("loud") == nil {
		t.Error("an unknown level was accepted")
	}
}

func TestNewRefusesBadConfig(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]telemetry.Config{
		"level":  {Log: telemetry.LogConfig{Level: "loud"}},
		"format": {Log: telemetry.LogConfig{Format: "xml"}},
		"ratio":  {Trace: telemetry.TraceConfig{SamplingRatio: 2}},
	} {
		if _, err := telemetry.New(t.Context(), cfg, new(bytes.Buffer)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestRegisterSharesEqualCollectors(t *testing.T) {
	t.Parallel()
	tel := newTelemetry(t, new(bytes.Buffer))
	counter := func() prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "c_total", Help: "h"})
	}
	a := telemetry.Register(tel, counter())
	b := telemetry.Register(tel, counter())
	a.Inc()
	b.Inc()
	families, err := tel.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
		if f.GetName() == "c_total" && f.GetMetric()[0].GetCounter().GetValue() != 2 {
			t.Errorf("c is %v, want 2", f.GetMetric()[0].GetCounter().GetValue())
		}
	}
	if all := strings.Join(names, " "); !strings.Contains(all, "crisp_build_info") || !strings.Contains(all, "go_goroutines") {
		t.Errorf("metrics are %s", all)
	}
}
