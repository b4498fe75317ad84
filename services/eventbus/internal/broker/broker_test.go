package broker_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	natsd "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/crisp-cri/crisp/services/eventbus/internal/access"
	"github.com/crisp-cri/crisp/services/eventbus/internal/broker"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// start runs a broker until the test ends and returns it with the folder of its keys.
func start(t *testing.T, change func(c *broker.Config)) (*broker.Broker, access.Config) {
	t.Helper()
	tel, _ := testkit.Telemetry(t)
	seeds := access.Config{KeysDir: filepath.Join(t.TempDir(), "keys")}
	keys, err := access.Open(seeds)
	if err != nil {
		t.Fatal(err)
	}
	cfg := broker.DefaultConfig()
	cfg.Listen, cfg.StoreDir = "127.0.0.1:0", t.TempDir()
	change(&cfg)
	b, err := broker.New(cfg, keys, "S", tel.Log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- b.Part().Run(ctx, func() { close(ready) }) }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if b.Ready(context.Background()) == nil {
			t.Error("ready after the stop")
		}
	})
	return b, seeds
}

func TestTLSWantsCertificateAndKey(t *testing.T) {
	t.Parallel()
	cert, key := testkit.Certificate(t)
	b, seeds := start(t, func(c *broker.Config) {
		c.TLS = broker.TLSConfig{CertFile: cert, KeyFile: key, CAFile: cert}
	})
	identity, err := nats.NkeyOptionFromSeed(seeds.SeedFile(access.Tail))
	if err != nil {
		t.Fatal(err)
	}
	addr := b.Addr().String()
	for name, tc := range map[string]struct {
		opts []nats.Option
		ok   bool
	}{
		"all":                      {[]nats.Option{identity, nats.RootCAs(cert), nats.ClientCert(cert, key)}, true},
		"no key":                   {[]nats.Option{nats.RootCAs(cert), nats.ClientCert(cert, key)}, false},
		"no client certificate":    {[]nats.Option{identity, nats.RootCAs(cert)}, false},
		"the authority is another": {[]nats.Option{identity, nats.ClientCert(cert, key)}, false},
	} {
		nc, err := nats.Connect("tls://"+addr, append(tc.opts, nats.Timeout(testkit.Patience))...)
		if (err == nil) != tc.ok {
			t.Errorf("%s: got %v", name, err)
		}
		if err == nil {
			nc.Close()
		}
	}
	if nc, err := b.Connect(); err != nil {
		t.Errorf("the bus itself: %v", err)
	} else {
		nc.Close()
	}
}

func TestLeafNodeJoinsACluster(t *testing.T) {
	t.Parallel()
	hub, err := natsd.NewServer(&natsd.Options{
		Host: "127.0.0.1", Port: natsd.RANDOM_PORT, NoSigs: true, NoLog: true,
		LeafNode: natsd.LeafNodeOpts{Host: "127.0.0.1", Port: natsd.RANDOM_PORT},
	})
	if err != nil {
		t.Fatal(err)
	}
	hub.Start()
	defer func() {
		hub.Shutdown()
		hub.WaitForShutdown()
	}()
	const limit = testkit.Patience
	if !hub.ReadyForConnections(limit) {
		t.Fatal("the hub does not start")
	}
	varz, err := hub.Varz(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = start(t, func(c *broker.Config) {
		c.Domain = "node-1"
		c.LeafRemotes = []broker.LeafRemote{{URL: "nats://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(varz.LeafNode.Port))}}
	})
	testkit.Eventually(t, limit, func() error {
		if n := hub.NumLeafNodes(); n != 1 {
			return fmt.Errorf("%d leaf nodes", n)
		}
		return nil
	})
}

func TestBrokenStoreIsReported(t *testing.T) {
	t.Parallel()
	tel, _ := testkit.Telemetry(t)
	keys, err := access.Open(access.Config{KeysDir: filepath.Join(t.TempDir(), "keys")})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := broker.DefaultConfig()
	cfg.Listen, cfg.StoreDir = "127.0.0.1:0", filepath.Join(file, "store")
	b, err := broker.New(cfg, keys, "S", tel.Log)
	if err == nil {
		err = b.Part().Run(t.Context(), func() {})
	}
	if err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("got %v", err)
	}
}

// A machine that is busy does not make a broker that works look as if it did not.
func TestReadyOnABusyMachine(t *testing.T) {
	b, _ := start(t, func(*broker.Config) {})
	var stop atomic.Bool
	var busy sync.WaitGroup
	for range 4 * runtime.GOMAXPROCS(0) {
		busy.Go(func() {
			for !stop.Load() { //nolint:revive // what it does is to keep a processor
			}
		})
	}
	defer busy.Wait()
	defer stop.Store(true)
	for i := range 20000 {
		if err := b.Ready(t.Context()); err != nil {
			t.Fatalf("check %d: %v", i, err)
		}
	}
}
