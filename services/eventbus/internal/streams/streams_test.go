package streams

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestCompareAndMerge(t *testing.T) {
	t.Parallel()
	want := DefaultConfig().stream()
	if drift := compare(want, want); drift != nil {
		t.Errorf("equal settings differ: %v", drift)
	}
	have := want
	have.MaxAge, have.Replicas, have.Description = time.Hour, 3, "mine"
	have.Metadata = map[string]string{"kept": "yes"}
	if diff := cmp.Diff([]string{"max_age: 1h0m0s instead of 72h0m0s", "replicas: 3 instead of 1"}, compare(have, want)); diff != "" {
		t.Error(diff)
	}
	merged := merge(have, want)
	if compare(merged, want) != nil || merged.Description != "mine" || merged.Metadata["kept"] != "yes" {
		t.Errorf("merged is %+v", merged)
	}
}

func TestKeeperFollowsTheBroker(t *testing.T) {
	t.Parallel()
	tel, _ := testkit.Telemetry(t)
	bus := testkit.NewBus(t)
	cfg := DefaultConfig()
	cfg.MaxBytes, cfg.MaxMessages = 5*config.MiB, 0
	keeper := New(cfg, func() (*nats.Conn, error) {
		return nats.Connect(bus.Config().URL, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1),
			nats.ReconnectWait(50*time.Millisecond))
	}, tel.Log)
	if keeper.Ready(t.Context()) == nil {
		t.Error("ready before the first check")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- keeper.Part().Run(ctx, func() {}) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	bus.Start()
	const limit = testkit.Patience
	testkit.Eventually(t, limit, func() error { return keeper.Ready(t.Context()) })
	testkit.Eventually(t, limit, func() error {
		var have jetstream.StreamConfig
		bus.With(func(js jetstream.JetStream) error {
			s, err := js.Stream(t.Context(), cfg.Name)
			if err == nil {
				have = s.CachedInfo().Config
			}
			return err
		})
		if drift := compare(have, cfg.stream()); drift != nil {
			return errors.New(drift[0])
		}
		return nil
	})
}

func TestTwoKeepersAtOnce(t *testing.T) {
	t.Parallel()
	tel, _ := testkit.Telemetry(t)
	bus := testkit.NewBus(t)
	bus.StartEmpty()
	cfg := DefaultConfig()
	cfg.MaxBytes = 5 * config.MiB
	connect := func() (*nats.Conn, error) { return nats.Connect(bus.Config().URL, nats.Timeout(testkit.Patience)) }
	var all errgroup.Group
	for i := range 8 {
		// The broker takes a second creation with the same settings for a repetition.
		cfg.MaxMessages = int64(100 + i)
		keeper := New(cfg, connect, tel.Log)
		all.Go(func() error {
			nc, err := connect()
			if err != nil {
				return err
			}
			defer nc.Close()
			js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(testkit.Patience))
			if err != nil {
				return err
			}
			_, _, err = keeper.check(t.Context(), js)
			return err
		})
	}
	if err := all.Wait(); err != nil {
		t.Error(err)
	}
}
