// Package crispshim is the command line of containerd-shim-crisp-v1, which runs the
// containers of one pod for Crisp or containerd.
//
// The protocol is that of containerd's shims, version 2: "start" reads BootstrapParams from
// the standard input, leaves the shim behind and prints where it listens; "delete" removes
// what a dead shim left of a container. The process of "start" is split in two, of which one
// becomes the shim; where that is not possible it starts the program anew, without action and
// with the socket as descriptor 3. All containers of a pod, by the annotations of the bundle, get
// the same shim.
//
// The shim is made to be one of many on a node: it keeps no caches, gives memory back when it
// has nothing to do, and links neither gRPC nor anything of Kubernetes.
package crispshim

import (
	"context"
	"flag"
	"fmt"
	"io"

	"github.com/containerd/errdefs"
)

// Name is the name of the runtime.
const Name = "io.containerd.crisp.v1"

// invocation is what a command line asks for.
type invocation struct {
	id, namespace, bundle, address, socket string
	debug, version, info                   bool
	action                                 string
}

func parse(args []string, stderr io.Writer) (invocation, error) {
	var i invocation
	f := flag.NewFlagSet("containerd-shim-crisp-v1", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.BoolVar(&i.debug, "debug", false, "log more")
	f.BoolVar(&i.version, "v", false, "show the version and exit")
	f.BoolVar(&i.version, "version", false, "show the version and exit")
	f.BoolVar(&i.info, "info", false, "show what the shim is as a protobuf message and exit")
	f.StringVar(&i.namespace, "namespace", "", "namespace of the containers")
	f.StringVar(&i.id, "id", "", "id of the container")
	f.StringVar(&i.bundle, "bundle", "", "bundle, if it is not the working folder")
	f.StringVar(&i.address, "address", "", "address of the runtime")
	f.StringVar(&i.socket, "socket", "", "path of the socket that is served")
	f.String("publish-binary", "", "ignored: events go to $TTRPC_ADDRESS")
	if err := f.Parse(args); err != nil {
		return i, err
	}
	i.action = f.Arg(0)
	if i.version || i.info {
		return i, nil
	}
	if i.namespace == "" {
		return i, fmt.Errorf("namespace is missing: %w", errdefs.ErrInvalidArgument)
	}
	return i, nil
}

// Main runs a command line, without the name of the program.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	i, err := parse(args, stderr)
	if err != nil {
		return err
	}
	switch {
	case i.version:
		return printVersion(stdout)
	case i.info:
		return printInfo(ctx, stdin, stdout)
	case i.action == "start":
		return start(ctx, i, stdin, stdout)
	case i.action == "delete":
		return remove(ctx, i, stdout)
	case i.action == "":
		return serveInherited(ctx, i)
	default:
		return fmt.Errorf("action %q: %w", i.action, errdefs.ErrInvalidArgument)
	}
}
