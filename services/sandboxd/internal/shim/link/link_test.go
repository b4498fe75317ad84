package link

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// service answers Kill by the signal: with an error of its kind, or never.
type service struct{}

func (service) Kill(ctx context.Context, r *taskapi.KillRequest) (*emptypb.Empty, error) {
	if ns, err := namespaces.NamespaceRequired(ctx); err != nil || ns != "k8s.io" {
		return nil, status.Errorf(codes.InvalidArgument, "namespace %q", ns)
	}
	switch r.GetSignal() {
	case 0:
		return &emptypb.Empty{}, nil
	case 99:
		<-ctx.Done()
		return nil, ctx.Err()
	default:
		return nil, status.Error(codes.Code(r.GetSignal()), "as asked")
	}
}

type grpcService struct {
	taskapi.UnimplementedTaskServer
}

func (grpcService) Kill(ctx context.Context, r *taskapi.KillRequest) (*emptypb.Empty, error) {
	return service{}.Kill(ctx, r)
}

type ttrpcService struct {
	taskapi.TTRPCTaskService
}

func (ttrpcService) Kill(ctx context.Context, r *taskapi.KillRequest) (*emptypb.Empty, error) {
	return service{}.Kill(ctx, r)
}

// serve serves over a protocol and returns the endpoint and what ends the server.
func serve(t *testing.T, protocol string) (Endpoint, func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	e := Endpoint{Version: 3, Address: "unix://" + l.Addr().String(), Protocol: protocol}
	done := make(chan struct{})
	var stop func()
	if protocol == ProtocolGRPC {
		s := grpc.NewServer()
		taskapi.RegisterTaskServer(s, grpcService{})
		go func() { defer close(done); _ = s.Serve(l) }()
		stop = s.Stop
	} else {
		s, err := ttrpc.NewServer()
		if err != nil {
			t.Fatal(err)
		}
		taskapi.RegisterTTRPCTaskService(s, ttrpcService{})
		go func() { defer close(done); _ = s.Serve(context.WithoutCancel(t.Context()), l) }()
		stop = func() { _ = s.Close() }
	}
	return e, func() {
		stop()
		<-done
	}
}

func TestCalls(t *testing.T) {
	for _, protocol := range []string{ProtocolTTRPC, ProtocolGRPC} {
		t.Run(protocol, func(t *testing.T) {
			e, stop := serve(t, protocol)
			c, err := Dial(t.Context(), e)
			if err != nil {
				t.Fatal(err)
			}
			kill := func(ctx context.Context, n codes.Code) error {
				return c.Task(ctx, e.Version, "Kill", &taskapi.KillRequest{Signal: uint32(n)}, &emptypb.Empty{})
			}
			if err := kill(t.Context(), codes.OK); err != nil {
				t.Error(err)
			}
			for code, is := range map[codes.Code]func(error) bool{
				codes.NotFound:           errdefs.IsNotFound,
				codes.FailedPrecondition: errdefs.IsFailedPrecondition,
				codes.Unimplemented:      errdefs.IsNotImplemented,
				codes.Unknown:            errdefs.IsInternal,
			} {
				if err := kill(t.Context(), code); !is(err) || errdefs.IsUnknown(err) || !strings.Contains(err.Error(), "as asked") {
					t.Errorf("%s: %v", code, err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := kill(ctx, 99); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("deadline: %v", err)
			}
			if err := c.Task(t.Context(), 2, "Kill", &taskapi.KillRequest{}, &emptypb.Empty{}); !errdefs.IsNotImplemented(err) {
				t.Errorf("other version: %v", err)
			}
			waiting := make(chan error, 1)
			go func() { waiting <- kill(context.WithoutCancel(t.Context()), 99) }()
			time.Sleep(20 * time.Millisecond)
			stop()
			testkit.Receive(t, c.Closed())
			if err := <-waiting; !errdefs.IsUnavailable(err) {
				t.Errorf("call that waited: %v", err)
			}
			if err := kill(t.Context(), codes.OK); !errdefs.IsUnavailable(err) {
				t.Errorf("after the loss: %v", err)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Whoever learns of a loss by a call finds the connection closed, and does not use it again.
func TestLossShowsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Conn{closed: make(chan struct{})}
		c.invoke = func(context.Context, string, string, proto.Message, proto.Message) error {
			time.AfterFunc(closeLag/2, func() { close(c.closed) }) // ttrpc tells it a little later
			return ttrpc.ErrClosed
		}
		err := c.Task(t.Context(), 3, "Kill", &taskapi.KillRequest{}, &emptypb.Empty{})
		if !errdefs.IsUnavailable(err) {
			t.Error(err)
		}
		select {
		case <-c.Closed():
		default:
			t.Error("the call returned before the connection was seen closed")
		}
	})
}

func TestDialErrors(t *testing.T) {
	for address, is := range map[string]func(error) bool{
		"unix:///no/such/socket": errdefs.IsUnavailable,
		"/crisp/no-such-socket":  errdefs.IsUnavailable,
		"vsock://3:1024":         errdefs.IsNotImplemented,
	} {
		if _, err := Dial(t.Context(), Endpoint{Version: 3, Address: address}); !is(err) {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// What a shim answers when the time of a call is over counts for nothing: the call ended with its time.
func TestAnswerAtTheDeadline(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	<-ctx.Done()
	err := (&Conn{}).native(ctx, status.Error(codes.Unknown, "runc did not terminate successfully"))
	if got := status.Code(errgrpc.ToGRPC(err)); got != codes.DeadlineExceeded || !strings.Contains(err.Error(), "runc") {
		t.Errorf("%v: %v", got, err)
	}
}
