package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	firstReconnectDelay = 50 * time.Millisecond
	maxReconnectDelay   = time.Second
)

// Dial returns a connection to the server at cfg.Socket. It does not wait for the
// server: the connection is made by the first call, and made again, quickly, after the
// server was restarted. Calls wait for the server within their deadline; if it ends
// before there is a connection, the error is errdefs.ErrUnavailable. All other errors
// of calls and streams are those of the handler (errgrpc.ToNative): test them with
// errors.Is. Unary calls whose context has no deadline get cfg.Timeout.
func Dial(cfg ClientConfig, tel *telemetry.Telemetry, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("rpc client: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	conn, err := grpc.NewClient("unix:"+cfg.Socket, append(dialOptions(cfg, tel), opts...)...)
	if err != nil {
		return nil, fmt.Errorf("rpc client of %s: %w", cfg.Socket, err)
	}
	return conn, nil
}

func dialOptions(cfg ClientConfig, tel *telemetry.Telemetry) []grpc.DialOption {
	metrics := telemetry.Register(tel, grpcprom.NewClientMetrics(grpcprom.WithClientHandlingTimeHistogram()))
	log := logger(tel.Log)
	logOpts := logOptions(func(codes.Code) slog.Level { return slog.LevelDebug })
	return []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: firstReconnectDelay, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxReconnectDelay,
			},
			MinConnectTimeout: maxReconnectDelay,
		}),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true),
			grpc.MaxCallRecvMsgSize(cfg.MaxMessage.Int()), grpc.MaxCallSendMsgSize(cfg.MaxMessage.Int())),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithFilter(traced),
			otelgrpc.WithTracerProvider(tel.TracerProvider), otelgrpc.WithPropagators(tel.Propagator))),
		grpc.WithChainUnaryInterceptor(
			nativeUnary,
			defaultDeadline(cfg.Timeout.Std()),
			selector.UnaryClientInterceptor(metrics.UnaryClientInterceptor(), notHealth()),
			selector.UnaryClientInterceptor(logging.UnaryClientInterceptor(log, logOpts...), notHealth()),
		),
		grpc.WithChainStreamInterceptor(
			nativeStream,
			selector.StreamClientInterceptor(metrics.StreamClientInterceptor(), notHealth()),
			selector.StreamClientInterceptor(logging.StreamClientInterceptor(log, logOpts...), notHealth()),
		),
	}
}

type timeoutOption struct {
	grpc.EmptyCallOption

	limit time.Duration
}

// WithTimeout bounds one unary call, whatever the default is and whether or not the
// context has a deadline (the earlier one counts); zero means no limit besides that of
// the context.
func WithTimeout(d time.Duration) grpc.CallOption { return timeoutOption{limit: d} }

func defaultDeadline(limit time.Duration) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		ctx, cancel := limited(ctx, limit, opts)
		defer cancel()
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}

// limited gives a call its time limit: that of its options, else the usual one if the
// context has none.
func limited(ctx context.Context, usual time.Duration, opts []grpc.CallOption) (context.Context, context.CancelFunc) {
	d := usual
	if _, ok := ctx.Deadline(); ok {
		d = 0
	}
	for _, o := range opts {
		if t, ok := o.(timeoutOption); ok {
			d = t.limit
		}
	}
	if d > 0 {
		return context.WithTimeout(ctx, d)
	}
	return ctx, func() {}
}

//nolint:revive // the signature is that of gRPC
func nativeUnary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return absent(cc, toNative(invoke(ctx, method, req, reply, cc, opts...)))
}

func nativeStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		return nil, absent(cc, toNative(err))
	}
	return clientStream{stream}, nil
}

// absent makes the end of the wait for a server that is not there ErrUnavailable: a
// caller must be able to tell it from a server that is slow.
func absent(cc *grpc.ClientConn, err error) error {
	if !errors.Is(err, context.DeadlineExceeded) || cc.GetState() == connectivity.Ready {
		return err
	}
	return fmt.Errorf("no connection to %s: %s: %w", cc.Target(), err.Error(), errdefs.ErrUnavailable)
}

// clientStream maps the errors of a stream.
type clientStream struct {
	grpc.ClientStream
}

func (s clientStream) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	return md, toNative(err)
}

func (s clientStream) CloseSend() error { return toNative(s.ClientStream.CloseSend()) }

func (s clientStream) SendMsg(m any) error { return toNative(s.ClientStream.SendMsg(m)) }

func (s clientStream) RecvMsg(m any) error { return toNative(s.ClientStream.RecvMsg(m)) }
