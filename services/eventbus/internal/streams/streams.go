// Package streams keeps the stream of events as it is configured: it creates it, brings
// back settings that somebody changed, and says what it found. It never deletes
// anything, and it survives a broker that comes late or goes away.
package streams

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/crisp-cri/crisp/services/internal/lifecycle"
)

const (
	attemptTimeout = 10 * time.Second
	retryDelay     = time.Second
	checkInterval  = 10 * time.Second
)

// Keeper keeps one stream.
type Keeper struct {
	cfg     Config
	connect func() (*nats.Conn, error)
	log     *slog.Logger

	// mu guards info, durable and err.
	mu sync.Mutex
	// info and durable are what the last successful check saw, nil before.
	info    *jetstream.StreamInfo
	durable []*jetstream.ConsumerInfo
	// err is the outcome of the last check.
	err error
}

// New returns a keeper that works over the connection that connect returns. The
// connection needs the right to manage the stream.
func New(cfg Config, connect func() (*nats.Conn, error), log *slog.Logger) *Keeper {
	return &Keeper{
		cfg: cfg, connect: connect, log: log,
		err: fmt.Errorf("stream %s: not checked yet: %w", cfg.Name, errdefs.ErrUnavailable),
	}
}

// Part checks the stream at start and every few seconds. It is ready after the first
// check, whatever its outcome: an external cluster may come later.
func (k *Keeper) Part() lifecycle.Part {
	return lifecycle.Part{Name: "stream", Run: k.run}
}

// Ready returns the outcome of the last check.
func (k *Keeper) Ready(context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

func (k *Keeper) run(ctx context.Context, ready func()) error {
	nc, err := k.connect()
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("jetstream: %w", err)
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		timer.Reset(k.round(ctx, js))
		ready()
	}
}

// round checks once and returns when to check again.
func (k *Keeper) round(ctx context.Context, js jetstream.JetStream) time.Duration {
	info, durable, err := k.check(ctx, js)
	if ctx.Err() != nil {
		return checkInterval
	}
	k.mu.Lock()
	changed := (k.err == nil) != (err == nil)
	first := k.info == nil && err != nil
	k.err = err
	if err == nil {
		k.info, k.durable = info, durable
	}
	k.mu.Unlock()
	switch {
	case err != nil && (changed || first):
		k.log.WarnContext(ctx, "stream not available", slog.String("stream", k.cfg.Name), slog.Any("error", err))
	case err == nil && changed:
		k.log.InfoContext(ctx, "stream available", slog.String("stream", k.cfg.Name),
			slog.Uint64("messages", info.State.Msgs), slog.Uint64("last_sequence", info.State.LastSeq))
	}
	if err != nil {
		return retryDelay
	}
	return checkInterval
}

func (k *Keeper) check(ctx context.Context, js jetstream.JetStream) (*jetstream.StreamInfo, []*jetstream.ConsumerInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	stream, err := k.ensure(ctx, js)
	if err != nil {
		return nil, nil, fmt.Errorf("stream %s: %w", k.cfg.Name, err)
	}
	lister := stream.ListConsumers(ctx)
	var durable []*jetstream.ConsumerInfo
	for c := range lister.Info() {
		if c.Config.Durable != "" {
			durable = append(durable, c)
		}
	}
	if err := lister.Err(); err != nil {
		return nil, nil, fmt.Errorf("stream %s: consumers: %w", k.cfg.Name, err)
	}
	return stream.CachedInfo(), durable, nil
}

// ensure returns the stream as configured, created or corrected if need be.
func (k *Keeper) ensure(ctx context.Context, js jetstream.JetStream) (jetstream.Stream, error) {
	stream, err := js.Stream(ctx, k.cfg.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = js.CreateStream(ctx, k.cfg.stream())
		if err == nil {
			k.log.InfoContext(ctx, "stream created", slog.String("stream", k.cfg.Name))
			return stream, nil
		}
		// Somebody else created it meanwhile, with settings of their own.
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			stream, err = js.Stream(ctx, k.cfg.Name)
		}
	}
	if err != nil {
		return nil, err
	}
	want := k.cfg.stream()
	drift := compare(stream.CachedInfo().Config, want)
	if len(drift) == 0 {
		return stream, nil
	}
	k.log.WarnContext(ctx, "stream settings brought back", slog.String("stream", k.cfg.Name),
		slog.Any("differences", drift))
	return js.UpdateStream(ctx, merge(stream.CachedInfo().Config, want))
}

// compare lists the settings in which the stream differs from what is wanted.
func compare(have, want jetstream.StreamConfig) []string {
	var out []string
	differ := func(name string, have, want any) {
		out = append(out, fmt.Sprintf("%s: %v instead of %v", name, have, want))
	}
	if !slices.Equal(have.Subjects, want.Subjects) {
		differ("subjects", have.Subjects, want.Subjects)
	}
	if have.MaxAge != want.MaxAge {
		differ("max_age", have.MaxAge, want.MaxAge)
	}
	if have.MaxBytes != want.MaxBytes {
		differ("max_bytes", have.MaxBytes, want.MaxBytes)
	}
	if have.MaxMsgs != want.MaxMsgs {
		differ("max_messages", have.MaxMsgs, want.MaxMsgs)
	}
	if have.Duplicates != want.Duplicates {
		differ("dedupe_window", have.Duplicates, want.Duplicates)
	}
	if have.Replicas != want.Replicas {
		differ("replicas", have.Replicas, want.Replicas)
	}
	if have.Discard != want.Discard {
		differ("discard", have.Discard, want.Discard)
	}
	if have.Retention != want.Retention {
		differ("retention", have.Retention, want.Retention)
	}
	if have.Storage != want.Storage {
		differ("storage", have.Storage, want.Storage)
	}
	return out
}

// merge puts the wanted settings over those of the stream and leaves alone what this
// package does not manage (placement, mirrors, metadata).
func merge(have, want jetstream.StreamConfig) jetstream.StreamConfig {
	have.Subjects, have.MaxAge, have.MaxBytes, have.MaxMsgs = want.Subjects, want.MaxAge, want.MaxBytes, want.MaxMsgs
	have.Duplicates, have.Replicas, have.Discard = want.Duplicates, want.Replicas, want.Discard
	have.Retention, have.Storage = want.Retention, want.Storage
	return have
}
