package plugin

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub"
)

// Metrics counts what plugins are asked and how they answer.
type Metrics struct {
	invocations *prometheus.CounterVec
	latency     *prometheus.HistogramVec
	active      prometheus.Gauge
}

// NewMetrics registers the metrics of plugins.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		invocations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_nri_plugin_invocations_total",
			Help: "Calls of plugins by plugin, operation and result (ok, rejected, timeout, lost, canceled).",
		}, []string{"plugin", "operation", "result"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "crisp_nri_plugin_latency_seconds",
			Help:    "Time that plugins take to answer, by plugin and operation.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"plugin", "operation"}),
		active: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "crisp_nri_active_plugins",
			Help: "Plugins that are synchronised and take part in requests.",
		}),
	}
	return m, errors.Join(reg.Register(m.invocations), reg.Register(m.latency), reg.Register(m.active))
}

// SetActive sets the number of active plugins.
func (m *Metrics) SetActive(n int) { m.active.Set(float64(n)) }

func (m *Metrics) called(plugin hub.ID, operation string, begin time.Time, err error) {
	m.latency.WithLabelValues(plugin.String(), operation).Observe(time.Since(begin).Seconds())
	m.invocations.WithLabelValues(plugin.String(), operation, result(err)).Inc()
}

func result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, hub.ErrLost):
		return "lost"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, context.Canceled):
		return "canceled"
	default:
		return "rejected"
	}
}
