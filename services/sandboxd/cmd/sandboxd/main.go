// Command sandboxd runs pods: it owns the shims, images, networks and every durable record
// of the node. It serves the gateway over a unix socket and needs root.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/crisp-cri/crisp/services/internal/cli"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/app"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect"
)

// umask is what containers expect: layers, mount points and shims inherit it. What must be
// closed to others is made so by its own mode.
const umask = 0o022

func main() {
	syscall.Umask(umask)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := cli.Main(ctx, cli.Program[config.Config]{
		Name: "sandboxd", Default: config.Default, Check: app.Check, Run: app.Run, Extra: inspect.Commands(app.NetworkConfig),
		Admin: func(c config.Config) string { return c.Admin.Listen },
	}, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd:", err)
		os.Exit(inspect.ExitCode(err))
	}
}
