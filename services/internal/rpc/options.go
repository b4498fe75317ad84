package rpc

import (
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// Registration is something given to NewServer: a service, or an option that changes
// how the server treats all calls.
type Registration interface {
	register(o *serverOptions)
}

type service struct {
	desc *grpc.ServiceDesc
	impl any
}

type serverOptions struct {
	services   []service
	checkPeers bool
	floor      bool
	lanes      bool
}

type registrationFunc func(o *serverOptions)

func (f registrationFunc) register(o *serverOptions) { f(o) }

// Service registers impl as the service that desc describes.
func Service(desc *grpc.ServiceDesc, impl any) Registration {
	return registrationFunc(func(o *serverOptions) {
		o.services = append(o.services, service{desc: desc, impl: impl})
	})
}

// WithoutPeerCheck lets everyone call who can open the socket.
func WithoutPeerCheck() Registration {
	return registrationFunc(func(o *serverOptions) { o.checkPeers = false })
}

// WithoutDeadlineFloor leaves the deadlines of the callers as they are. It is for
// clients that are not ours and that choose short deadlines on purpose.
func WithoutDeadlineFloor() Registration {
	return registrationFunc(func(o *serverOptions) { o.floor = false })
}

// levelOf is the level of the log line of a finished call.
func levelOf(code codes.Code) slog.Level {
	switch code {
	case codes.Internal, codes.Unknown, codes.DataLoss:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}
