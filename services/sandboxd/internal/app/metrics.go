package app

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// metrics are sandboxd's own metrics. What one call takes, and how many fail, is in those of the
// gRPC server already; here is what takes part in several calls, or in none.
type metrics struct {
	networkSeconds  *prometheus.HistogramVec
	networkFailures *prometheus.CounterVec
	pulls           *prometheus.CounterVec
	pullBytes       prometheus.Counter
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
		pulls: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_image_pulls_total", Help: "Pulls that ended, by result. Requests that joined a pull are one with it.",
		}, []string{"result"})),
		pullBytes: telemetry.Register(tel, prometheus.NewCounter(prometheus.CounterOpts{
			Name: "crisp_sandboxd_image_pull_bytes_total", Help: "Compressed bytes of the images that pulls brought, with layers that were there before.",
		})),
		ends: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_container_ends_total", Help: "Containers that ended, by the reason that CRI shows.",
		}, []string{"reason"})),
	}
}

// ended counts the end of a container.
func (m *metrics) ended(reason string) { m.ends.WithLabelValues(reason).Inc() }

// pulled counts a pull that has ended.
func (m *metrics) pulled(e *eventv1.ImageProgress) {
	switch e.GetState() {
	case eventv1.PullState_PULL_STATE_DONE:
		m.pulls.WithLabelValues("done").Inc()
		m.pullBytes.Add(float64(e.GetBytesTotal()))
	case eventv1.PullState_PULL_STATE_FAILED:
		m.pulls.WithLabelValues("failed").Inc()
	default: // goes on
	}
}

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
