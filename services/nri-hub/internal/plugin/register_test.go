package plugin

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// leaving is a host that is told to end just when a plugin registers.
type leaving struct {
	anyone

	end    context.CancelFunc
	served chan error // how it was when the plugin came to the host
}

func (l leaving) Admit(plug.Info) error {
	l.end()
	return nil
}

func (l leaving) Serve(ctx context.Context, p plug.Plugin) error {
	l.served <- ctx.Err()
	p.Close(plug.ErrStopping)
	return ctx.Err()
}

type idle struct{}

func (idle) RunPodSandbox(context.Context, *nri.PodSandbox) error { return nil }

// A plugin whose registration was answered gets its Configure even if everything ends at that
// moment: it waits for that without a limit.
func TestRegistrationAtTheEnd(t *testing.T) {
	t.Parallel()
	metrics, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	host := leaving{end: cancel, served: make(chan error, 1)}
	s := NewServer(Config{RegistrationTimeout: testkit.Patience, AnnouncedTimeout: testkit.Patience, RequestTimeout: testkit.Patience, NRIVersion: "v0.12.5"}, Parts{
		Log: slog.New(slog.DiscardHandler), Tracer: noop.NewTracerProvider().Tracer(""), Metrics: metrics, Host: host,
		Peer: func(net.Conn) (Peer, error) { return Peer{}, nil },
	})
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	p, err := stub.New(idle{}, stub.WithPluginName("p"), stub.WithPluginIdx("10"), stub.WithSocketPath(path), stub.WithOnClose(func() {}))
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan error, 1)
	go func() { started <- p.Start(context.Background()) }()
	select {
	case err := <-started:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(testkit.Patience):
		t.Fatal("the plugin hangs")
	}
	if err := testkit.Receive(t, host.served); err == nil {
		t.Error("the host was not at its end")
	}
	p.Stop()
	if err := testkit.Receive(t, ended); err != nil {
		t.Error(err)
	}
}
