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
	defer stop()
	program := cli.Program[config.Config]{
		Name:    "nri-hub",
		Default: config.Default,
		Run:     app.Run,
	}
	if err := cli.Main(ctx, program, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "nri-hub:", err)
		os.Exit(1)
	}
}
