package plugin

import (
	"strconv"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// A plugin that connects under ever new names does not fill the hub's memory, and takes the
// metrics of no plugin that is at work.
func TestMetricsOfManyNames(t *testing.T) {
	m, err := NewMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	steady := plug.ID{Index: "10", Name: "steady"}
	const calls = 3 * maxLabelled
	for i := range calls {
		m.called(steady, "CreateContainer", time.Now(), "ok")
		fleeting := plug.ID{Index: "20", Name: "n" + strconv.Itoa(i)}
		m.called(fleeting, "Synchronize", time.Now(), "ok")
		m.TimedOut(fleeting, nri.Event_CREATE_CONTAINER)
	}
	if got := testutil.ToFloat64(m.invocations.WithLabelValues(steady.String(), "CreateContainer", "ok")); got != calls {
		t.Errorf("calls of the plugin at work: %v, want %d", got, calls)
	}
	if got, want := testutil.CollectAndCount(m.latency), maxLabelled; got != want {
		t.Errorf("latencies of %d plugins and operations, want %d", got, want)
	}
	if got, want := testutil.CollectAndCount(m.invocations), 1+2*(maxLabelled-1); got != want {
		t.Errorf("counts of %d plugins, operations and results, want %d", got, want)
	}
}
