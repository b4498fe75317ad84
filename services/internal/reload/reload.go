// Package reload changes the configuration of a running process when it is told to.
//
// The sign is SIGHUP, which the program catches from its start on. The file is read and
// checked as at the start; a file that is wrong changes nothing and is reported. Some keys can
// be changed at once: the program names them and applies them. A change of any other key is
// reported as one that waits for the next start. The service manager hears that the process
// reloads and is ready again, whatever came of it.
package reload

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/pelletier/go-toml/v2"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// Source is where a new configuration comes from.
type Source[C any] struct {
	// Signals tells when; nil is never.
	Signals <-chan os.Signal
	// Load reads and checks the file of the start anew.
	Load func() (C, error)
}

// OnHangup catches SIGHUP for the life of the process. Signals that come while one is waiting
// are one with it.
func OnHangup() <-chan os.Signal {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGHUP)
	return signals
}

// Target is a running process.
type Target[C any] struct {
	// Live are the keys that Apply brings into force, each with all keys below it, such as
	// "log.level" or "runtime.handlers".
	Live []string
	// Apply brings the live keys into force, all of them or, with an error, none.
	Apply func(ctx context.Context, cfg C) error
}

// Part reloads whenever the source says so. cfg is the configuration of the start.
func Part[C any](cfg C, src Source[C], to Target[C], tel *telemetry.Telemetry) lifecycle.Part {
	r := &reloader[C]{
		src: src, to: to, log: tel.Log, start: cfg, last: cfg,
		total: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_config_reloads_total", Help: "Times that the process was told to read its configuration anew, by result.",
		}, []string{"result"})),
		good: telemetry.Register(tel, prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "crisp_config_last_reload_successful", Help: "1 if the configuration that was read last is in force, 0 if it was refused.",
		})),
	}
	r.good.Set(1)
	return lifecycle.Part{Name: "reload", Run: r.run}
}

type reloader[C any] struct {
	src   Source[C]
	to    Target[C]
	log   *slog.Logger
	total *prometheus.CounterVec
	good  prometheus.Gauge
	start C // whose other keys are in force
	last  C // whose live keys are in force
}

func (r *reloader[C]) run(ctx context.Context, ready func()) error {
	ready()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.src.Signals:
			r.notify(ctx, reloading())
			r.reload(ctx)
			r.notify(ctx, daemon.SdNotifyReady)
		}
	}
}

func (r *reloader[C]) reload(ctx context.Context) {
	changed, err := r.apply(ctx)
	if err != nil {
		r.good.Set(0)
		r.total.WithLabelValues("refused").Inc()
		r.log.ErrorContext(ctx, "new configuration refused, the old one stays in force", slog.Any("error", err))
		return
	}
	r.good.Set(1)
	r.total.WithLabelValues("applied").Inc()
	r.log.InfoContext(ctx, "configuration read anew", slog.Any("changed", changed))
}

// apply returns the keys that changed and are now in force.
func (r *reloader[C]) apply(ctx context.Context) ([]string, error) {
	cfg, err := r.src.Load()
	if err != nil {
		return nil, err
	}
	sinceStart, err := Changes(r.start, cfg)
	if err != nil {
		return nil, err
	}
	changed, err := Changes(r.last, cfg)
	if err != nil {
		return nil, err
	}
	if err := r.to.Apply(ctx, cfg); err != nil {
		return nil, err
	}
	r.last = cfg
	if waiting := slices.DeleteFunc(sinceStart, r.live); len(waiting) > 0 {
		r.log.WarnContext(ctx, "changes of the configuration that wait for the next start", slog.Any("keys", waiting))
	}
	return slices.DeleteFunc(changed, func(key string) bool { return !r.live(key) }), nil
}

func (r *reloader[C]) live(key string) bool {
	return slices.ContainsFunc(r.to.Live, func(of string) bool { return key == of || strings.HasPrefix(key, of+".") })
}

// Changes returns the keys in which two configurations differ, in order.
func Changes[C any](a, b C) ([]string, error) {
	first, err := Keys(a)
	if err != nil {
		return nil, err
	}
	second, err := Keys(b)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, key := range slices.Sorted(maps.Keys(merged(first, second))) {
		if first[key] != second[key] { // a value that is there is never the empty text
			out = append(out, key)
		}
	}
	return out, nil
}

func merged(a, b map[string]string) map[string]string {
	out := maps.Clone(a)
	maps.Copy(out, b)
	return out
}

// Keys returns the keys of a configuration, with dots, and their values as text.
func Keys(cfg any) (map[string]string, error) {
	raw, err := toml.Marshal(cfg)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	tree := map[string]any{}
	if err := toml.Unmarshal(raw, &tree); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	out := map[string]string{}
	flatten("", tree, out)
	return out, nil
}

func flatten(prefix string, tree map[string]any, out map[string]string) {
	for name, value := range tree {
		if below, ok := value.(map[string]any); ok {
			flatten(prefix+name+".", below, out)
			continue
		}
		out[prefix+name] = fmt.Sprintf("%#v", value)
	}
}

// reloading is the message that a reload has begun, with the time that makes it one.
func reloading() string {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil {
		return daemon.SdNotifyReloading
	}
	return fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, now.Nano()/1000)
}

func (r *reloader[C]) notify(ctx context.Context, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		r.log.WarnContext(ctx, "service manager not notified", slog.String("state", state), slog.Any("error", err))
	}
}
