// Package backend holds the gateway's clients: sandboxd, its session, and nri-hub.
//
// The clients are the generated ones over a connection that gives every method its own
// time limit from one table. Errors are errdefs errors. The session and the hub's stream
// are kept up by Run methods that try again for as long as they run; everything else is
// stateless. All types may be used concurrently.
package backend

import (
	"time"

	"google.golang.org/grpc"

	containerv1 "github.com/crisp-cri/crisp/proto/gen/crisp/container/v1"
	imagev1 "github.com/crisp-cri/crisp/proto/gen/crisp/image/v1"
	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	sandboxv1 "github.com/crisp-cri/crisp/proto/gen/crisp/sandbox/v1"
)

// Sandboxd is the client of sandboxd, by service.
type Sandboxd struct {
	Sandboxes  sandboxv1.SandboxServiceClient
	Containers containerv1.ContainerServiceClient
	Images     imagev1.ImageServiceClient
	Node       nodev1.NodeServiceClient
	// Conn is what the clients are on, with its time limits.
	Conn grpc.ClientConnInterface
}

// NewSandboxd returns a client on conn. hold is how long a call waits for a sandboxd that
// is away before it is Unavailable.
func NewSandboxd(conn *grpc.ClientConn, hold time.Duration) *Sandboxd {
	limited := limitedConn{conn: conn, calls: conn, hold: hold}
	return &Sandboxd{
		Sandboxes:  sandboxv1.NewSandboxServiceClient(limited),
		Containers: containerv1.NewContainerServiceClient(limited),
		Images:     imagev1.NewImageServiceClient(limited),
		Node:       nodev1.NewNodeServiceClient(limited),
		Conn:       limited,
	}
}
