// Package app puts the event bus together: configuration, broker, stream, health, and
// the subcommand that prints events.
package app

import (
	"context"
	"fmt"
	"io"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/eventbus/internal/access"
	"github.com/crisp-cri/crisp/services/eventbus/internal/broker"
	"github.com/crisp-cri/crisp/services/eventbus/internal/streams"
	"github.com/crisp-cri/crisp/services/internal/admin"
	"github.com/crisp-cri/crisp/services/internal/cli"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/reload"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const name = "eventbus"

// Program returns the command line of the process.
func Program() cli.Program[Config] {
	return cli.Program[Config]{
		Name: name, Default: Default, Run: Run, Extra: []cli.Command{tailCommand()},
		Admin: func(c Config) string { return c.Admin.Listen },
	}
}

// Run runs the bus until ctx is done.
func Run(ctx context.Context, cfg Config, stderr io.Writer, again reload.Source[Config]) error {
	tel, err := telemetry.New(ctx, telemetry.Config{Service: name, Log: cfg.Log, Trace: cfg.Tracing}, stderr)
	if err != nil {
		return err
	}
	parts, err := build(cfg, tel)
	if err != nil {
		return err
	}
	parts = append(parts, reload.Part(cfg, again, reload.Target[Config]{
		Live:  []string{"log.level"},
		Apply: func(_ context.Context, c Config) error { return tel.SetLevel(c.Log.Level) },
	}, tel))
	return lifecycle.Run(ctx, tel.Log, parts...)
}

// build makes everything and starts nothing.
func build(cfg Config, tel *telemetry.Telemetry) ([]lifecycle.Part, error) {
	var keys *access.Keys
	if !cfg.Broker.External() {
		var err error
		if keys, err = access.Open(cfg.Access); err != nil {
			return nil, err
		}
	}
	bus, err := broker.New(cfg.Broker, keys, cfg.Stream.Name, tel.Log)
	if err != nil {
		return nil, err
	}
	keeper := streams.New(cfg.Stream, bus.Connect, tel.Log)
	server, err := rpc.NewServer(cfg.RPC, tel)
	if err != nil {
		return nil, fmt.Errorf("health: %w", err)
	}
	telemetry.Register(tel, keeper.Collector())
	telemetry.Register(tel, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "crisp_eventbus_clients",
		Help: "Connected clients of the own server.",
	}, func() float64 { return float64(bus.Clients()) }))
	return []lifecycle.Part{
		tel.Part(),
		admin.Part(cfg.Admin, tel,
			admin.Check{Name: "jetstream", Ready: bus.Ready},
			admin.Check{Name: "stream", Ready: keeper.Ready}),
		bus.Part(),
		keeper.Part(),
		server.Part("health"),
	}, nil
}
