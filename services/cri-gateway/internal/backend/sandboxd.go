// Package backend holds the gateway's clients: sandboxd, its session, and nri-hub.
//
// The clients are the generated ones over a connection that gives every method its own
// time limit (package limited). Errors are errdefs errors. The session and the hub's stream
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
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/limited"
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
	own := limited.New(conn, conn, hold)
	return &Sandboxd{
		Sandboxes:  sandboxv1.NewSandboxServiceClient(own),
		Containers: containerv1.NewContainerServiceClient(own),
		Images:     imagev1.NewImageServiceClient(own),
		Node:       nodev1.NewNodeServiceClient(own),
		Conn:       own,
	}
}
