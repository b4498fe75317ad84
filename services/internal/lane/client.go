package lane

import (
	"context"
	"sync"
	"time"

	"github.com/containerd/errdefs/pkg/errgrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	lanev1 "github.com/crisp-cri/crisp/proto/gen/crisp/lane/v1"
)

const (
	// retryAfter is how long calls go without a lane after a server was found to have none.
	retryAfter = time.Minute
	// stallAfter is how long one message may wait for a server that reads nothing, on top of all
	// that the connection holds. Then the lane counts as broken.
	stallAfter = 5 * time.Second
)

// Client makes unary calls over a lane of conn; streams, and calls to a server that knows no
// lanes, go over conn as usual. It is safe for concurrent use and ends with conn.
type Client struct {
	conn  *grpc.ClientConn
	trace propagation.TextMapPropagator

	// mu guards all below.
	mu      sync.Mutex
	lane    *opened // the latest; nil before the first call
	without time.Time
}

// NewClient returns a client whose first call opens the lane. The trace of a call's context
// goes on at the server in the way of the propagator.
func NewClient(conn *grpc.ClientConn, trace propagation.TextMapPropagator) *Client {
	return &Client{conn: conn, trace: trace}
}

// NewStream opens a stream of conn.
func (c *Client) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return c.conn.NewStream(ctx, desc, method, opts...)
}

// Invoke makes a call. It does not wait for a server that is away. Errors wrap the sentinel
// of containerd/errdefs that the handler's error had; the options count only where there is
// no lane.
func (c *Client) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	in, isMessage := args.(proto.Message)
	out, alsoMessage := reply.(proto.Message)
	l := c.open(ctx)
	if l == nil || !isMessage || !alsoMessage {
		return c.conn.Invoke(ctx, method, args, reply, opts...)
	}
	err := c.call(ctx, l, method, in, out)
	if err == nil {
		return nil
	}
	if !l.refused() {
		return errgrpc.ToNative(err)
	}
	c.mu.Lock()
	c.without = time.Now()
	c.mu.Unlock()
	return c.conn.Invoke(ctx, method, args, reply, opts...)
}

// open returns the lane, which may be about to be opened; nil if the server has none.
func (c *Client) open(ctx context.Context) *opened {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.without.IsZero() && time.Since(c.without) < retryAfter {
		return nil
	}
	if c.lane == nil || c.lane.broken() {
		c.lane = &opened{
			waiting: make(map[uint64]chan *lanev1.OpenResponse), sending: make(chan struct{}, 1),
			up: make(chan struct{}), down: make(chan struct{}),
		}
		// The lane belongs to no call, and to no call's trace.
		go c.lane.run(trace.ContextWithSpanContext(context.WithoutCancel(ctx), trace.SpanContext{}), c.conn)
	}
	return c.lane
}

func (c *Client) call(ctx context.Context, l *opened, method string, in, out proto.Message) error {
	select {
	case <-l.up:
	case <-l.down:
		return l.err
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
	data, err := proto.Marshal(in)
	if err != nil {
		return status.Errorf(codes.Internal, "request of %s: %v", method, err)
	}
	req := &lanev1.OpenRequest{Method: method, Message: data}
	if deadline, ok := ctx.Deadline(); ok {
		req.TimeoutUs = max(time.Until(deadline).Microseconds(), 1)
	}
	if trace.SpanContextFromContext(ctx).IsValid() {
		req.Trace = make(map[string]string)
		c.trace.Inject(ctx, propagation.MapCarrier(req.GetTrace()))
	}
	answer := l.await(req)
	defer l.forget(req.GetId())
	l.send(ctx, req)
	select {
	case resp := <-answer:
		if resp.GetCode() != 0 {
			return status.Error(codes.Code(resp.GetCode()), resp.GetText())
		}
		if err := proto.Unmarshal(resp.GetMessage(), out); err != nil {
			return status.Errorf(codes.Internal, "response of %s: %v", method, err)
		}
		return nil
	case <-l.down:
		return l.err
	case <-ctx.Done():
		// Nobody waits any longer, so neither may the caller.
		go l.send(context.WithoutCancel(ctx), &lanev1.OpenRequest{Id: req.GetId(), Cancel: true})
		return status.FromContextError(ctx.Err()).Err()
	}
}

// opened is the client's side of one lane.
type opened struct {
	// up is closed when calls can be made, down when none can any more.
	up, down chan struct{}
	// stream and stop, which breaks the lane, are set before up is closed.
	stream grpc.BidiStreamingClient[lanev1.OpenRequest, lanev1.OpenResponse]
	stop   context.CancelFunc
	// err says why the lane is down; it is set before down is closed.
	err error

	// sending holds something while a message goes out: they go one by one, and a caller waits
	// for its turn no longer than for its answer.
	sending chan struct{}

	// mu guards all below.
	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan *lanev1.OpenResponse
}

// run opens the lane and hands out the answers until it breaks. ctx must not be bound to a
// call.
func (l *opened) run(ctx context.Context, conn *grpc.ClientConn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer close(l.down)
	stream, err := lanev1.NewLaneServiceClient(conn).Open(ctx, grpc.WaitForReady(false))
	if err != nil {
		l.err = ended(err)
		return
	}
	l.stream, l.stop = stream, cancel
	close(l.up)
	for {
		resp, err := stream.Recv()
		if err != nil {
			l.err = ended(err)
			return
		}
		l.mu.Lock()
		answer := l.waiting[resp.GetId()]
		delete(l.waiting, resp.GetId())
		l.mu.Unlock()
		if answer != nil {
			answer <- resp
		}
	}
}

// ended is what a lane's end means for its calls: no answer will come, whatever the reason.
func ended(err error) error {
	if code := status.Code(errgrpc.ToGRPC(err)); code == codes.Unimplemented {
		return status.Error(code, err.Error())
	}
	return status.Errorf(codes.Unavailable, "lane broken: %v", err)
}

// refused reports whether the server knows no lanes.
func (l *opened) refused() bool { return l.broken() && status.Code(l.err) == codes.Unimplemented }

func (l *opened) broken() bool {
	select {
	case <-l.down:
		return true
	default:
		return false
	}
}

// await gives the call its id and returns where its answer will be.
func (l *opened) await(req *lanev1.OpenRequest) <-chan *lanev1.OpenResponse {
	answer := make(chan *lanev1.OpenResponse, 1)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	req.Id = l.last
	l.waiting[l.last] = answer
	return answer
}

func (l *opened) forget(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, id)
}

// send gives up silently when the lane has broken, which run sees too, or ctx is done. It breaks
// the lane of a server that reads nothing.
func (l *opened) send(ctx context.Context, req *lanev1.OpenRequest) {
	select {
	case l.sending <- struct{}{}:
	case <-l.down:
		return
	case <-ctx.Done():
		return
	}
	defer func() { <-l.sending }()
	stalled := time.AfterFunc(stallAfter, l.stop)
	defer stalled.Stop()
	_ = l.stream.Send(req)
}
