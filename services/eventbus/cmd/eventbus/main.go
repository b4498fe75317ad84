// Command eventbus runs the message bus that carries events from the container runtime
// to whoever wants to know, and prints them as they come.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/crisp-cri/crisp/services/eventbus/internal/app"
	"github.com/crisp-cri/crisp/services/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := cli.Main(ctx, app.Program(), os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "eventbus:", err)
		os.Exit(1)
	}
}
