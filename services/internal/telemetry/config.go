package telemetry

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
)

// LogConfig is the section "log" of every configuration file.
type LogConfig struct {
	// Level is the least severe level that is written; empty means "info".
	Level string `toml:"level" comment:"Least severe level that is written: debug, info, warn or error."`
	// Format is the form of the lines; empty means "text".
	Format string `toml:"format" comment:"Form of the log lines on standard error: text or json."`
}

// DefaultLogConfig returns level info in text form.
func DefaultLogConfig() LogConfig { return LogConfig{Level: "info", Format: "text"} }

// Validate implements config.Validator.
func (c LogConfig) Validate() error {
	var errs []error
	if _, err := parseLevel(c.Level); err != nil {
		errs = append(errs, err)
	}
	switch c.Format {
	case "", "text", "json":
	default:
		errs = append(errs, fmt.Errorf("format: %q is not known, write \"text\" or \"json\"", c.Format))
	}
	return errors.Join(errs...)
}

func parseLevel(text string) (slog.Level, error) {
	switch strings.ToLower(text) {
	case "debug":
		return slog.LevelDebug, nil
	case "", "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("level: %q is not known, write \"debug\", \"info\", \"warn\" or \"error\"", text)
}

// TraceConfig is the section "tracing" of every configuration file. Where spans are
// sent is told by the standard environment variables OTEL_EXPORTER_OTLP_ENDPOINT or
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; without them nothing is exported.
type TraceConfig struct {
	// SamplingRatio is the share of traces that is recorded, from 0 to 1, among those
	// that begin in this process. A trace that comes from a caller follows the caller.
	SamplingRatio float64 `toml:"sampling_ratio" comment:"Share (0 to 1) of the traces beginning here that is recorded. Spans are exported only if\nOTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set in the environment."`
}

// DefaultTraceConfig records every trace.
func DefaultTraceConfig() TraceConfig { return TraceConfig{SamplingRatio: 1} }

// Validate implements config.Validator.
func (c TraceConfig) Validate() error {
	if c.SamplingRatio < 0 || c.SamplingRatio > 1 {
		return fmt.Errorf("sampling_ratio: %v is out of range, write a number from 0 to 1", c.SamplingRatio)
	}
	return nil
}
