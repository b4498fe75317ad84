package lane

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	lanev1 "github.com/crisp-cri/crisp/proto/gen/crisp/lane/v1"
	"github.com/crisp-cri/crisp/services/internal/spare"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// Server answers the calls of lanes with the unary methods of other services. Use NewServer,
// then Add for each service; after that it is safe for concurrent use.
type Server struct {
	lanev1.UnimplementedLaneServiceServer

	tel     *telemetry.Telemetry
	around  grpc.UnaryServerInterceptor
	methods map[string]method
}

type method struct {
	desc grpc.MethodDesc
	impl any
}

// NewServer makes a server without methods. around runs around each call; it has to turn
// panics into errors.
func NewServer(tel *telemetry.Telemetry, around grpc.UnaryServerInterceptor) *Server {
	return &Server{tel: tel, around: around, methods: make(map[string]method)}
}

// Add makes the unary methods of a service callable.
func (s *Server) Add(desc *grpc.ServiceDesc, impl any) {
	for _, m := range desc.Methods {
		name := "/" + desc.ServiceName + "/" + m.MethodName
		s.methods[name] = method{desc: m, impl: impl}
	}
}

// Open serves one lane. It returns when the caller has gone or, once the stream's context
// has ended because the server stops, when all calls that have begun are answered.
func (s *Server) Open(stream grpc.BidiStreamingServer[lanev1.OpenRequest, lanev1.OpenResponse]) error {
	// The span of the lane is none of its calls'.
	ctx := trace.ContextWithSpanContext(context.WithoutCancel(stream.Context()), trace.SpanContext{})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := &served{server: s, stream: stream, ctx: ctx, run: spare.New(ctx.Done()), cancels: make(map[uint64]context.CancelFunc)}
	received := make(chan error, 1)
	// It ends at the latest when this call has returned, which ends the stream.
	go func() { received <- l.receive() }()
	select {
	case err := <-received:
		cancel()
		l.calls.Wait()
		return err
	case <-stream.Context().Done():
	}
	l.close()
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		l.calls.Wait()
	}()
	select {
	case <-finished:
	case err := <-received:
		cancel()
		<-finished
		return err
	}
	return status.FromContextError(stream.Context().Err()).Err()
}

// served is the server's side of one lane.
type served struct {
	server *Server
	stream grpc.BidiStreamingServer[lanev1.OpenRequest, lanev1.OpenResponse]
	ctx    context.Context //nolint:containedctx // of all calls; it ends with the lane
	run    *spare.Pool
	calls  sync.WaitGroup

	// sending serialises what goes out.
	sending sync.Mutex

	// mu guards all below.
	mu      sync.Mutex
	closed  bool
	cancels map[uint64]context.CancelFunc
}

// receive begins calls until the caller has gone.
func (l *served) receive() error {
	for {
		req, err := l.stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case req.GetCancel():
			l.mu.Lock()
			cancel := l.cancels[req.GetId()]
			l.mu.Unlock()
			if cancel != nil {
				cancel()
			}
		default:
			l.begin(req)
		}
	}
}

func (l *served) begin(req *lanev1.OpenRequest) {
	ctx, cancel := l.ctx, context.CancelFunc(nil)
	if limit := time.Duration(req.GetTimeoutUs()) * time.Microsecond; limit > 0 {
		ctx, cancel = context.WithTimeout(ctx, limit)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	l.mu.Lock()
	closed := l.closed
	if !closed {
		l.cancels[req.GetId()] = cancel
		l.calls.Add(1)
	}
	l.mu.Unlock()
	if closed {
		cancel()
		l.send(failure(req.GetId(), status.New(grpccodes.Unavailable, "the server is stopping")))
		return
	}
	l.run.Go(func() {
		defer l.calls.Done()
		defer cancel()
		l.send(l.server.answer(ctx, req))
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.cancels, req.GetId())
	})
}

// send gives up silently when the lane has broken: receive sees that too.
func (l *served) send(resp *lanev1.OpenResponse) {
	l.sending.Lock()
	defer l.sending.Unlock()
	_ = l.stream.Send(resp)
}

// close makes the server refuse what comes from now on.
func (l *served) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

func failure(id uint64, st *status.Status) *lanev1.OpenResponse {
	return &lanev1.OpenResponse{Id: id, Code: int32(st.Code()), Text: st.Message()}
}

// answer performs one call.
func (s *Server) answer(ctx context.Context, req *lanev1.OpenRequest) *lanev1.OpenResponse {
	m, ok := s.methods[req.GetMethod()]
	if !ok {
		return failure(req.GetId(), status.Newf(grpccodes.Unimplemented, "no method %q on a lane", req.GetMethod()))
	}
	if len(req.GetTrace()) > 0 {
		ctx = s.tel.Propagator.Extract(ctx, propagation.MapCarrier(req.GetTrace()))
	}
	if s.tel.Recording() {
		var span trace.Span
		ctx, span = s.tel.Tracer.Start(ctx, strings.TrimPrefix(req.GetMethod(), "/"), trace.WithSpanKind(trace.SpanKindServer))
		defer span.End()
		resp := s.call(ctx, m, req)
		if resp.GetCode() != 0 {
			span.SetStatus(codes.Error, resp.GetText())
		}
		return resp
	}
	return s.call(ctx, m, req)
}

func (s *Server) call(ctx context.Context, m method, req *lanev1.OpenRequest) *lanev1.OpenResponse {
	ctx = grpc.NewContextWithServerTransportStream(ctx, callStream(req.GetMethod()))
	decode := func(into any) error {
		msg, ok := into.(proto.Message)
		if !ok {
			return status.Errorf(grpccodes.Internal, "request of type %T", into)
		}
		if err := proto.Unmarshal(req.GetMessage(), msg); err != nil {
			return status.Errorf(grpccodes.Internal, "request of %s: %v", req.GetMethod(), err)
		}
		return nil
	}
	out, err := m.desc.Handler(m.impl, ctx, decode, s.around)
	if err != nil {
		return failure(req.GetId(), status.Convert(err))
	}
	msg, ok := out.(proto.Message)
	if !ok {
		return failure(req.GetId(), status.Newf(grpccodes.Internal, "response of type %T", out))
	}
	data, err := proto.Marshal(msg)
	if err != nil {
		return failure(req.GetId(), status.Newf(grpccodes.Internal, "response of %s: %v", req.GetMethod(), err))
	}
	return &lanev1.OpenResponse{Id: req.GetId(), Message: data}
}

// callStream names the method of a call to who asks gRPC for it. Metadata goes nowhere.
type callStream string

// Method implements grpc.ServerTransportStream.
func (s callStream) Method() string { return string(s) }

// SetHeader implements grpc.ServerTransportStream.
func (callStream) SetHeader(metadata.MD) error { return nil }

// SendHeader implements grpc.ServerTransportStream.
func (callStream) SendHeader(metadata.MD) error { return nil }

// SetTrailer implements grpc.ServerTransportStream.
func (callStream) SetTrailer(metadata.MD) error { return nil }
