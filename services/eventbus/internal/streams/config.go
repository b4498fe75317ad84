package streams

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/events"
)

// Config is the section "stream" of the configuration file.
type Config struct {
	Name         string          `toml:"name" comment:"Name of the stream that holds the events."`
	MaxAge       config.Duration `toml:"max_age" comment:"How long events are kept; 0s: without limit."`
	MaxBytes     config.ByteSize `toml:"max_bytes" comment:"Most bytes that are kept; the oldest events go first. 0B: without limit."`
	MaxMessages  int64           `toml:"max_messages" comment:"Most events that are kept; 0: without limit."`
	DedupeWindow config.Duration `toml:"dedupe_window" comment:"How long the stream remembers the ids of events to drop repetitions."`
	Replicas     int             `toml:"replicas" comment:"Copies of the stream in a cluster."`
}

// DefaultConfig keeps three days, a million events or half a GiB.
func DefaultConfig() Config {
	return Config{
		Name:         events.DefaultStream,
		MaxAge:       config.Duration(72 * time.Hour),
		MaxBytes:     512 * config.MiB,
		MaxMessages:  1_000_000,
		DedupeWindow: config.Duration(2 * time.Minute),
		Replicas:     1,
	}
}

// Validate implements config.Validator.
func (c Config) Validate() error {
	var errs []error
	if c.Name == "" || strings.ContainsAny(c.Name, " .*>/\\") {
		errs = append(errs, fmt.Errorf("name: %q is no stream name, write for example %q", c.Name, events.DefaultStream))
	}
	if c.MaxMessages < 0 {
		errs = append(errs, fmt.Errorf("max_messages: %d is negative, write 0 for no limit", c.MaxMessages))
	}
	if c.DedupeWindow.Std() < 100*time.Millisecond {
		errs = append(errs, fmt.Errorf("dedupe_window: %v is too short, write at least 100ms", c.DedupeWindow))
	}
	if c.MaxAge != 0 && c.MaxAge < c.DedupeWindow {
		errs = append(errs, fmt.Errorf("max_age: %v is shorter than dedupe_window", c.MaxAge))
	}
	if c.Replicas < 1 || c.Replicas > 5 {
		errs = append(errs, fmt.Errorf("replicas: %d is out of range, write a number from 1 to 5", c.Replicas))
	}
	return errors.Join(errs...)
}

func (c Config) stream() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:        c.Name,
		Description: "Events of the container runtime",
		Subjects:    []string{events.SubjectPrefix + ".>"},
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardOld,
		Storage:     jetstream.FileStorage,
		MaxAge:      c.MaxAge.Std(),
		MaxBytes:    unlimited(int64(c.MaxBytes)),
		MaxMsgs:     unlimited(c.MaxMessages),
		Duplicates:  c.DedupeWindow.Std(),
		Replicas:    c.Replicas,
	}
}

// unlimited writes "no limit" as JetStream does.
func unlimited(n int64) int64 {
	if n == 0 {
		return -1
	}
	return n
}
