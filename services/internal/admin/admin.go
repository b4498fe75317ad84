// Package admin is the HTTP listener for operators: metrics, health, readiness and, if asked
// for, the log level and profiles.
//
// It has no authentication, and loopback is open to every process in the host's network,
// those of pods included. So the profiles and the log level are served only if the
// configuration says so, and on loopback alone.
package admin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

const (
	shutdownTimeout = 3 * time.Second
	headerTimeout   = 5 * time.Second
)

// Config is the section "admin" of every configuration file.
type Config struct {
	// Listen is a host:port; empty turns the listener off.
	Listen string `toml:"listen" comment:"Address of the HTTP listener for metrics and health; empty turns it off."`
	// Debug adds what only who looks for a fault needs.
	Debug bool `toml:"debug" comment:"Serve profiles and the changing of the log level too, if the listener is on loopback.\nAnybody in the network of the host, pods included, can use them then."`
}

// Validate implements config.Validator.
func (c Config) Validate() error {
	if c.Listen == "" {
		return nil
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		return fmt.Errorf("listen: %q is no address, write for example \"127.0.0.1:9670\"", c.Listen)
	}
	return nil
}

// Check is one condition of readiness. Ready returns nil if it is met; it gets a
// context with a deadline of two seconds and may be called concurrently.
type Check struct {
	Name  string
	Ready func(ctx context.Context) error
}

// Part serves until it is stopped:
//
//	/metrics     Prometheus metrics of tel.Registry
//	/healthz     200 as long as the process serves at all
//	/readyz      200, or 503 with a JSON list of the checks that fail
//	/loglevel    GET the log level, PUT a new one (with Debug, on loopback only)
//	/debug/pprof profiles (with Debug, on loopback only)
func Part(cfg Config, tel *telemetry.Telemetry, checks ...Check) lifecycle.Part {
	return lifecycle.Part{
		Name:        "admin",
		StopTimeout: shutdownTimeout + time.Second,
		Run: func(ctx context.Context, ready func()) error {
			if cfg.Listen == "" {
				ready()
				<-ctx.Done()
				return nil
			}
			return serve(ctx, ready, cfg, tel, checks)
		},
	}
}

func serve(ctx context.Context, ready func(), cfg Config, tel *telemetry.Telemetry, checks []Check) error {
	var lc net.ListenConfig
	lis, err := lc.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", cfg.Listen, err)
	}
	addr, ok := lis.Addr().(*net.TCPAddr)
	srv := &http.Server{
		Handler:           Handler(tel, cfg.Debug && ok && addr.IP.IsLoopback(), checks...),
		ReadHeaderTimeout: headerTimeout,
		ErrorLog:          slog.NewLogLogger(tel.Log.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(lis) }()
	tel.Log.InfoContext(ctx, "admin listening", slog.String("address", lis.Addr().String()))
	ready()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", cfg.Listen, err)
	case <-ctx.Done():
	}
	stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	// A running profile or a slow scraper must not hold up the stop.
	if err := srv.Shutdown(stopCtx); err != nil {
		err = srv.Close()
		if err != nil {
			return fmt.Errorf("close: %w", err)
		}
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", cfg.Listen, err)
	}
	return nil
}
