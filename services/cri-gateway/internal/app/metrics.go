package app

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
)

// metrics are the gateway's own metrics, as the domain sees them.
type metrics struct {
	inflight *prometheus.GaugeVec
	seconds  *prometheus.HistogramVec
	failures *prometheus.CounterVec
	joins    *prometheus.CounterVec
	held     prometheus.Histogram
	follow   prometheus.Gauge
	cut      prometheus.Counter
}

func newMetrics(tel *telemetry.Telemetry) *metrics {
	kind := []string{"operation"}
	return &metrics{
		inflight: telemetry.Register(tel, prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "crisp_gateway_operations_in_flight", Help: "Operations that run now.",
		}, kind)),
		seconds: telemetry.Register(tel, prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crisp_gateway_operation_duration_seconds", Help: "Time from the start of an operation to its end.",
			Buckets: prometheus.ExponentialBuckets(0.005, 2, 16),
		}, kind)),
		failures: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_gateway_operation_failures_total", Help: "Operations that ended with an error.",
		}, kind)),
		joins: telemetry.Register(tel, prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_gateway_operation_joins_total", Help: "Calls that joined an operation in flight.",
		}, kind)),
		held: telemetry.Register(tel, prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "crisp_gateway_hub_wait_seconds", Help: "Time that calls were held back for nri-hub.",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 12),
		})),
		follow: telemetry.Register(tel, prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "crisp_gateway_event_followers", Help: "Clients that follow container events.",
		})),
		cut: telemetry.Register(tel, prometheus.NewCounter(prometheus.CounterOpts{
			Name: "crisp_gateway_event_followers_cut_total",
			Help: "Clients that were cut off from container events because they or the feed fell behind.",
		})),
	}
}

// Begin implements operation.Observer.
func (m *metrics) Begin(kind string) func(error) {
	start := time.Now()
	m.inflight.WithLabelValues(kind).Inc()
	return func(err error) {
		m.inflight.WithLabelValues(kind).Dec()
		m.seconds.WithLabelValues(kind).Observe(time.Since(start).Seconds())
		if err != nil {
			m.failures.WithLabelValues(kind).Inc()
		}
	}
}

// Join implements operation.Observer.
func (m *metrics) Join(kind string) { m.joins.WithLabelValues(kind).Inc() }

// Held implements backend.HubObserver.
func (m *metrics) Held(d time.Duration) { m.held.Observe(d.Seconds()) }

// Following implements containerevents.Observer.
func (m *metrics) Following(n int) { m.follow.Set(float64(n)) }

// Cut implements containerevents.Observer.
func (m *metrics) Cut() { m.cut.Inc() }
