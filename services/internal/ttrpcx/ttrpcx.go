// Package ttrpcx gives ttrpc clients and servers the same treatment that package rpc
// gives gRPC ones: spans that continue the caller's trace, metrics, debug logs, and on
// servers recovery from panics and the mapping of errors.
//
// ttrpc has interceptors for unary calls only. Streams are passed through unchanged.
package ttrpcx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/otelttrpc"
	"github.com/containerd/ttrpc"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crisp-cri/crisp/services/internal/brief"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// ClientOptions returns the options for a ttrpc client. What its calls return is still
// an error of ttrpc: give it to Error.
func ClientOptions(tel *telemetry.Telemetry) []ttrpc.ClientOpts {
	calls := newMetrics(tel, "client")
	observe := func(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, info *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
		begin := time.Now()
		err := invoke(ctx, req, resp)
		outcome := err
		// The answer of a handler that failed is in the response, not in err.
		if outcome == nil && resp.GetStatus().GetCode() != int32(codes.OK) {
			outcome = status.ErrorProto(resp.GetStatus())
		}
		calls.done(ctx, info.FullMethod, begin, outcome)
		return err
	}
	if !tel.Recording() {
		return []ttrpc.ClientOpts{ttrpc.WithChainUnaryClientInterceptor(observe, passTrace(tel.Propagator))}
	}
	return []ttrpc.ClientOpts{ttrpc.WithChainUnaryClientInterceptor(
		observe,
		otelttrpc.UnaryClientInterceptor(
			otelttrpc.WithTracerProvider(tel.TracerProvider), otelttrpc.WithPropagators(tel.Propagator)),
	)}
}

// passTrace lets the server go on with the caller's trace where no span is made here.
func passTrace(propagator propagation.TextMapPropagator) ttrpc.UnaryClientInterceptor {
	return func(ctx context.Context, req *ttrpc.Request, resp *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
		if trace.SpanContextFromContext(ctx).IsValid() {
			headers := make(propagation.MapCarrier)
			propagator.Inject(ctx, headers)
			for k, v := range headers {
				req.Metadata = append(req.Metadata, &ttrpc.KeyValue{Key: k, Value: v})
			}
		}
		return invoke(ctx, req, resp)
	}
}

// ServerOptions returns the options for a ttrpc server. Its handlers return errors that
// wrap a sentinel of containerd/errdefs.
func ServerOptions(tel *telemetry.Telemetry) []ttrpc.ServerOpt {
	calls := newMetrics(tel, "server")
	observe := func(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
		begin := time.Now()
		resp, err := method(ctx, unmarshal)
		calls.done(ctx, info.FullMethod, begin, err)
		return resp, err
	}
	return []ttrpc.ServerOpt{ttrpc.WithChainUnaryServerInterceptor(
		otelttrpc.UnaryServerInterceptor(
			otelttrpc.WithTracerProvider(tel.TracerProvider), otelttrpc.WithPropagators(tel.Propagator)),
		observe,
		recoverAndMap(tel),
	)}
}

// Error turns the error of a ttrpc call into one that wraps a sentinel of
// containerd/errdefs. A connection that is gone is errdefs.ErrUnavailable; the error
// then still is ttrpc.ErrClosed, too.
func Error(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, ttrpc.ErrClosed) || errors.Is(err, ttrpc.ErrServerClosed) {
		return fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	return errgrpc.ToNative(err)
}

func recoverAndMap(tel *telemetry.Telemetry) ttrpc.UnaryServerInterceptor {
	return func(ctx context.Context, unmarshal ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (resp any, err error) {
		defer func() {
			if p := recover(); p != nil {
				tel.Log.ErrorContext(ctx, "ttrpc handler panicked", slog.String(telemetry.KeyRPC, info.FullMethod),
					slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
				resp, err = nil, status.Errorf(codes.Internal, "%s: the handler panicked", info.FullMethod)
			}
		}()
		resp, err = method(ctx, unmarshal)
		return resp, brief.Status(errgrpc.ToGRPC(err))
	}
}

// metrics counts the calls of one side under names like those of gRPC.
type metrics struct {
	log     *slog.Logger
	handled *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

func newMetrics(tel *telemetry.Telemetry, side string) *metrics {
	labels := []string{"ttrpc_service", "ttrpc_method"}
	return &metrics{
		log: tel.Log,
		handled: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "ttrpc_" + side + "_handled_total",
			Help: "Total number of ttrpc calls completed on the " + side + ", by outcome.",
		}, append(labels, "ttrpc_code"))),
		seconds: telemetry.Register(tel, prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "ttrpc_" + side + "_handling_seconds",
			Help:    "Time that ttrpc calls took on the " + side + ".",
			Buckets: prometheus.DefBuckets,
		}, labels)),
	}
}

func (m *metrics) done(ctx context.Context, fullMethod string, begin time.Time, err error) {
	took := time.Since(begin)
	service, method, _ := strings.Cut(strings.TrimPrefix(fullMethod, "/"), "/")
	code := status.Code(errgrpc.ToGRPC(err))
	m.handled.WithLabelValues(service, method, code.String()).Inc()
	m.seconds.WithLabelValues(service, method).Observe(took.Seconds())
	attrs := []slog.Attr{
		slog.String(telemetry.KeyRPC, fullMethod), slog.String("code", code.String()), slog.Duration("took", took),
	}
	if err != nil {
		attrs = append(attrs, slog.Any(telemetry.KeyError, err))
	}
	m.log.LogAttrs(ctx, slog.LevelDebug, "ttrpc finished call", attrs...)
}
