// Command nri-hub connects NRI plugins with the container runtime.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/crisp-cri/crisp/services/internal/cli"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/app"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := cli.Main(ctx, cli.Program[config.Config]{
		Name: "nri-hub", Default: config.Default, Run: app.Run, Admin: func(c config.Config) string { return c.Admin.Listen },
	}, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "nri-hub:", err)
		os.Exit(1)
	}
}
