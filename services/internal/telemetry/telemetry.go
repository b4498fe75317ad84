// Package telemetry makes the logger, the tracer provider and the metrics registry of
// a process, and gives them out as one value.
//
// Log lines carry the ids of the span in their context. Span contexts are always
// valid and always travel on, also when nothing is exported, so that one process
// without an exporter does not cut a trace in two. Metrics go to an own registry.
// Nothing is kept in global variables of this package or of OpenTelemetry, except
// that errors of the exporter, which have no other way out, are sent to the log.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
)

const (
	scope        = "github.com/crisp-cri/crisp"
	flushTimeout = 5 * time.Second
	batchTimeout = time.Second
)

// Config says who the process is and how much it tells.
type Config struct {
	// Service is the name of the process, such as "sandboxd".
	Service string
	Log     LogConfig
	Trace   TraceConfig
	// SpanProcessors see every recorded span, next to the exporter.
	SpanProcessors []sdktrace.SpanProcessor
}

// Telemetry holds what a process reports through. The fields are read-only and safe
// for concurrent use.
type Telemetry struct {
	// Service is the name of the process.
	Service string
	// Log writes to the writer given to New.
	Log *slog.Logger
	// Level is the threshold of Log; it may be changed at any time.
	Level *slog.LevelVar
	// Tracer makes the spans of this project's own code.
	Tracer trace.Tracer
	// TracerProvider is for instrumentation libraries.
	TracerProvider trace.TracerProvider
	// Propagator reads and writes W3C trace context and baggage.
	Propagator propagation.TextMapPropagator
	// Registry holds the metrics that the admin listener shows.
	Registry *prometheus.Registry

	provider  *sdktrace.TracerProvider
	recording bool
}

// New builds the telemetry of a process. Logs go to w. An OTLP exporter (gRPC) is made
// if the environment names an endpoint; all other OTEL_EXPORTER_OTLP_*, OTEL_BSP_*,
// OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER variables keep their standard
// meaning. New does not wait for the collector to be there.
func New(ctx context.Context, cfg Config, w io.Writer) (*Telemetry, error) {
	if err := errors.Join(cfg.Log.Validate(), cfg.Trace.Validate()); err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	level := new(slog.LevelVar)
	threshold, err := parseLevel(cfg.Log.Level)
	if err != nil {
		return nil, err
	}
	level.Set(threshold)
	t := &Telemetry{
		Service:    cfg.Service,
		Level:      level,
		Log:        newLogger(cfg, level, w),
		Registry:   newRegistry(cfg.Service),
		Propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{}),
	}
	t.provider, err = newProvider(ctx, cfg, t.Log)
	if err != nil {
		return nil, err
	}
	t.TracerProvider = t.provider
	t.recording = exporterWanted() || len(cfg.SpanProcessors) > 0
	t.Tracer = t.provider.Tracer(scope)
	return t, nil
}

// Part flushes the spans when the process stops. It belongs first in the list of
// parts, so that it is stopped last.
func (t *Telemetry) Part() lifecycle.Part {
	return lifecycle.Part{
		Name:        "telemetry",
		StopTimeout: flushTimeout + time.Second,
		Run: func(ctx context.Context, ready func()) error {
			ready()
			<-ctx.Done()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
			defer cancel()
			if err := t.provider.Shutdown(ctx); err != nil {
				t.Log.WarnContext(ctx, "spans not flushed", slog.Any(KeyError, err))
			}
			return nil
		},
	}
}

// Recording reports whether spans go anywhere. Where they do not, making one is a waste, as
// long as the caller's trace context is passed on.
func (t *Telemetry) Recording() bool { return t.recording }

// SetLevel changes the log threshold of the running process. The text is one of
// "debug", "info", "warn" and "error".
func (t *Telemetry) SetLevel(text string) error {
	level, err := parseLevel(text)
	if err != nil {
		return err
	}
	t.Level.Set(level)
	return nil
}

// Register adds a collector to the registry of t and returns it. If an equal one is
// registered already, that one is returned, so that two users of a package share its
// metrics. It panics if the collector contradicts one of another kind, as that is a
// mistake in the program.
func Register[C prometheus.Collector](t *Telemetry, c C) C {
	err := t.Registry.Register(c)
	if already, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := already.ExistingCollector.(C); ok {
			return same
		}
	}
	if err != nil {
		panic(err)
	}
	return c
}

func newRegistry(service string) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	build := buildinfo.Read()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "crisp_build_info",
		Help: "Always 1; the labels say what the process was built from.",
		ConstLabels: prometheus.Labels{
			"service": service, "version": build.Version, "commit": build.Commit, "go_version": build.Go,
		},
	})
	info.Set(1)
	reg.MustRegister(info, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

func newProvider(ctx context.Context, cfg Config, log *slog.Logger) (*sdktrace.TracerProvider, error) {
	res, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(), resource.WithProcessPID(),
		resource.WithFromEnv(), resource.WithAttributes(
			attribute.String("service.name", cfg.Service),
			attribute.String("service.version", buildinfo.Read().Version)))
	if err != nil {
		return nil, fmt.Errorf("telemetry: resource: %w", err)
	}
	opts := []sdktrace.TracerProviderOption{sdktrace.WithResource(res)}
	if os.Getenv("OTEL_TRACES_SAMPLER") == "" {
		opts = append(opts, sdktrace.WithSampler(
			sdktrace.ParentBased(sdktrace.TraceIDRatioBased(cfg.Trace.SamplingRatio))))
	}
	for _, p := range cfg.SpanProcessors {
		opts = append(opts, sdktrace.WithSpanProcessor(p))
	}
	if exporterWanted() {
		exporter, err := otlptracegrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("telemetry: trace exporter: %w", err)
		}
		opts = append(opts, sdktrace.WithBatcher(exporter, batchOptions()...))
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
			log.WarnContext(context.WithoutCancel(ctx), "tracing", slog.Any(KeyError, err))
		}))
	}
	return sdktrace.NewTracerProvider(opts...), nil
}

func exporterWanted() bool {
	if os.Getenv("OTEL_SDK_DISABLED") == "true" || os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return false
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}

// batchOptions shortens the standard delay of five seconds, unless the environment
// sets one: a person who looks for the trace of a call does so at once.
func batchOptions() []sdktrace.BatchSpanProcessorOption {
	if os.Getenv("OTEL_BSP_SCHEDULE_DELAY") != "" {
		return nil
	}
	return []sdktrace.BatchSpanProcessorOption{sdktrace.WithBatchTimeout(batchTimeout)}
}
