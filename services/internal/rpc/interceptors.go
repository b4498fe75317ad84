package rpc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/crisp-cri/crisp/services/internal/brief"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	// answerTime is kept back from each deadline, so that a handler whose own calls run
	// into theirs still gets its answer to the caller.
	answerTime = 20 * time.Millisecond
	// minTime is the least time with which work is begun.
	minTime = 100 * time.Millisecond
)

// prepare is a step before the handler that may replace the context or refuse the call.
// It is written once and serves unary calls and streams.
type prepare func(ctx context.Context, method string) (context.Context, context.CancelFunc, error)

func (p prepare) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	ctx, cancel, err := p(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	defer cancel()
	return next(ctx, req)
}

func (p prepare) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx, cancel, err := p(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	defer cancel()
	return next(srv, contextStream{ServerStream: ss, ctx: ctx})
}

// contextStream is a stream with another context.
type contextStream struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // gRPC hands out the context of a stream this way
}

func (s contextStream) Context() context.Context { return s.ctx }

func isHealth(method string) bool {
	return strings.HasPrefix(method, "/"+healthv1.Health_ServiceDesc.ServiceName+"/")
}

// traced is the filter of the trace handlers: health checks make no spans.
func traced(info *stats.RPCTagInfo) bool { return !isHealth(info.FullMethodName) }

// notHealth is the matcher that keeps health checks out of logs and metrics.
func notHealth() selector.Matcher {
	return selector.MatchFunc(func(_ context.Context, c interceptors.CallMeta) bool {
		return c.Service != healthv1.Health_ServiceDesc.ServiceName
	})
}

func (c peerCheck) prepare(ctx context.Context, _ string) (context.Context, context.CancelFunc, error) {
	return ctx, func() {}, c.check(ctx)
}

// deadlineFloor takes answerTime off the deadline and refuses calls that come too late
// to be worth beginning.
func deadlineFloor(ctx context.Context, method string) (context.Context, context.CancelFunc, error) {
	deadline, ok := ctx.Deadline()
	if !ok || isHealth(method) {
		return ctx, func() {}, nil
	}
	if left := time.Until(deadline); left < minTime {
		return ctx, nil, status.Errorf(codes.DeadlineExceeded, "not begun: %v are left, at least %v are needed", left, minTime)
	}
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(-answerTime))
	return ctx, cancel, nil
}

func mapUnary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	resp, err := next(ctx, req)
	return resp, toGRPC(err)
}

func mapStream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	return toGRPC(next(srv, ss))
}

// recoverOption turns a panic of a handler into Internal, with the stack in the log.
func recoverOption(tel *telemetry.Telemetry) recovery.Option {
	panics := telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "crisp_rpc_panics_total",
		Help: "Panics of RPC handlers that were turned into an error.",
	}, []string{"grpc_method"}))
	return recovery.WithRecoveryHandlerContext(func(ctx context.Context, p any) error {
		method, ok := grpc.Method(ctx)
		if !ok {
			method = "unknown"
		}
		panics.WithLabelValues(method).Inc()
		tel.Log.ErrorContext(ctx, "rpc handler panicked", slog.String(telemetry.KeyRPC, method),
			slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
		return status.Errorf(codes.Internal, "%s: the handler panicked", method)
	})
}

// logger adapts the middleware to slog: snake case keys, and no work below the level.
// The only event that is logged is the end of a call, see logOptions.
func logger(log *slog.Logger) logging.Logger {
	return logging.LoggerFunc(func(ctx context.Context, level logging.Level, _ string, fields ...any) {
		if !log.Enabled(ctx, slog.Level(level)) {
			return
		}
		attrs := make([]slog.Attr, 0, len(fields)/2)
		for i := 0; i+1 < len(fields); i += 2 {
			if key, ok := fields[i].(string); ok {
				attrs = append(attrs, slog.Any(strings.ReplaceAll(key, ".", "_"), fields[i+1]))
			}
		}
		log.LogAttrs(ctx, slog.Level(level), "rpc finished call", attrs...)
	})
}

func logOptions(levelOf func(codes.Code) slog.Level) []logging.Option {
	return []logging.Option{
		logging.WithLogOnEvents(logging.FinishCall),
		logging.WithDisableLoggingFields(logging.ComponentFieldKey, "protocol", "peer.address"),
		logging.WithLevels(func(c codes.Code) logging.Level { return logging.Level(levelOf(c)) }),
	}
}

// toGRPC turns an error into a status of its class and its text. The wrapped errors do not
// travel as details: the caller would see their texts a second time. Only the class goes
// through errgrpc, because that walks into errors whose Unwrap returns nil.
func toGRPC(err error) error {
	if err == nil {
		return nil
	}
	if st, ok := status.FromError(err); ok {
		return brief.Status(st.Err())
	}
	class := errdefs.Resolve(err)
	return status.Error(status.Code(errgrpc.ToGRPC(class)), brief.Text(err.Error()))
}

// toNative gives the caller back the error that the handler returned, as far as it has
// a sentinel. The end of a stream is no error and stays as it is.
func toNative(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return errgrpc.ToNative(err)
}
