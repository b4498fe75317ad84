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
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := cli.Main(ctx, cli.Program[config.Config]{
		Name: app.Name, Default: config.Default, Run: app.Run, Admin: func(c config.Config) string { return c.Admin.Listen },
	}, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri-gateway:", err)
		os.Exit(1)
	}
}
