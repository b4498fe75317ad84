package app

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// metrics are sandboxd's own metrics. What one call takes, and how many fail, is in those of the
// gRPC server already; here is what takes part in several calls, or in none.
type metrics struct {
	networkSeconds  *prometheus.HistogramVec
	networkFailures *prometheus.CounterVec
	ends            *prometheus.CounterVec
}

func newMetrics(tel *telemetry.Telemetry) *metrics {
	operation := []string{"operation"}
	return &metrics{
		networkSeconds: telemetry.Register(tel, prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crisp_sandboxd_network_operation_duration_seconds", Help: "Time that attaching and detaching pods took, with all their networks.",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 14),
		}, operation)),
		networkFailures: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_network_operation_failures_total", Help: "Times that attaching or detaching a pod failed.",
		}, operation)),
		ends: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_container_ends_total", Help: "Containers that ended, by the reason that CRI shows.",
		}, []string{"reason"})),
	}
}

// ended counts the end of a container.
func (m *metrics) ended(reason string) { m.ends.WithLabelValues(reason).Inc() }

// meteredNetwork measures the operations of a network.
type meteredNetwork struct {
	port.Network

	metrics *metrics
}

// Attach implements port.Network.
func (n meteredNetwork) Attach(ctx context.Context, req pod.NetworkRequest) (_ pod.NetworkResult, err error) {
	defer n.metrics.network("attach", time.Now(), &err)
	return n.Network.Attach(ctx, req)
}

// Detach implements port.Network.
func (n meteredNetwork) Detach(ctx context.Context, req pod.NetworkRequest, raw []byte) (err error) {
	defer n.metrics.network("detach", time.Now(), &err)
	return n.Network.Detach(ctx, req, raw)
}

func (m *metrics) network(operation string, begun time.Time, err *error) {
	m.networkSeconds.WithLabelValues(operation).Observe(time.Since(begun).Seconds())
	if *err != nil {
		m.networkFailures.WithLabelValues(operation).Inc()
	}
}
