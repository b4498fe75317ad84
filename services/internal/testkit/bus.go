package testkit

import (
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	natsd "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/crisp-cri/crisp/services/internal/events"
)

// Bus is a NATS server with JetStream in the process of the test. Its store and its
// port survive a stop.
type Bus struct {
	tb   testing.TB
	opts natsd.Options
	srv  *natsd.Server
}

// NewBus reserves a port and a store. The bus does not run yet: see Start.
func NewBus(tb testing.TB) *Bus {
	tb.Helper()
	b := &Bus{tb: tb, opts: natsd.Options{
		NoLog: true, NoSigs: true, JetStream: true, StoreDir: tb.TempDir(),
	}}
	host, port, err := net.SplitHostPort(ReservePort(tb))
	if err == nil {
		b.opts.Host = host
		b.opts.Port, err = strconv.Atoi(port)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(b.Stop)
	return b
}

// Config returns the client configuration for this bus and the node "node-1".
func (b *Bus) Config() events.ClientConfig {
	cfg := events.DefaultClientConfig()
	cfg.URL = "nats://" + net.JoinHostPort(b.opts.Host, strconv.Itoa(b.opts.Port))
	cfg.Node = "node-1"
	return cfg
}

// Start runs the bus and creates its stream if the store has none.
func (b *Bus) Start() {
	b.tb.Helper()
	b.StartEmpty()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.tb.Context()), Patience)
	defer cancel()
	b.With(func(js jetstream.JetStream) error {
		_, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
			Name: events.DefaultStream, Subjects: []string{events.SubjectPrefix + ".>"}, Duplicates: time.Minute,
		})
		// What is tested may create it too, and was first.
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			return nil
		}
		return err
	})
}

// Stop ends the bus; its store stays.
func (b *Bus) Stop() {
	if b.srv != nil {
		b.srv.Shutdown()
		b.srv.WaitForShutdown()
		b.srv = nil
	}
}

// Wipe removes the store of a stopped bus.
func (b *Bus) Wipe() {
	b.tb.Helper()
	if err := os.RemoveAll(b.opts.StoreDir); err != nil {
		b.tb.Fatal(err)
	}
}

// With calls use with a connection of its own.
func (b *Bus) With(use func(js jetstream.JetStream) error) {
	b.tb.Helper()
	nc, err := nats.Connect(b.srv.ClientURL(), nats.InProcessServer(b.srv), nats.Timeout(Patience))
	if err != nil {
		b.tb.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(Patience))
	if err == nil {
		err = use(js)
	}
	if err != nil {
		b.tb.Fatal(err)
	}
}

// StartEmpty runs the bus with the stream that its store has, or none.
func (b *Bus) StartEmpty() {
	b.tb.Helper()
	opts := b.opts
	srv, err := natsd.NewServer(&opts)
	if err != nil {
		b.tb.Fatal(err)
	}
	srv.Start()
	b.srv = srv
	if !srv.ReadyForConnections(Patience) {
		b.tb.Fatal("the bus does not start")
	}
}
