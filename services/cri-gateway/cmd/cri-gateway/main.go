// Command cri-gateway serves the Kubernetes container runtime interface.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/app"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/config"
	"github.com/crisp-cri/crisp/services/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	program := cli.Program[config.Config]{Name: app.Name, Default: config.Default, Run: app.Run}
	if err := cli.Main(ctx, program, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", app.Name, err)
		stop()
		os.Exit(1)
	}
}
