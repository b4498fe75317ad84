package plugin

import (
	"context"
	"errors"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Metrics counts what plugins are asked and how they answer.
type Metrics struct {
	invocations *prometheus.CounterVec
	latency     *prometheus.HistogramVec
	active      prometheus.Gauge
	degraded    prometheus.Gauge
}

// NewMetrics registers the metrics of plugins.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		invocations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_nri_plugin_invocations_total",
			Help: "Calls of plugins by plugin, operation and result (ok, rejected, timeout, late, lost, canceled).",
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
		degraded: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "crisp_nri_degraded_plugins",
			Help: "Plugins that have not answered in time; requests go on without them.",
		}),
	}
	return m, errors.Join(reg.Register(m.invocations), reg.Register(m.latency), reg.Register(m.active), reg.Register(m.degraded))
}

// SetActive sets the numbers of active and of degraded plugins.
func (m *Metrics) SetActive(active, degraded int) {
	m.active.Set(float64(active))
	m.degraded.Set(float64(degraded))
}

// TimedOut counts a call that was not answered in time. Its answer, if it comes, counts
// again, as a late one.
func (m *Metrics) TimedOut(plugin plug.ID, e nri.Event) {
	m.invocations.WithLabelValues(plugin.String(), e.PrettyName(), "timeout").Inc()
}

func (m *Metrics) called(plugin plug.ID, operation string, begin time.Time, outcome string) {
	m.latency.WithLabelValues(plugin.String(), operation).Observe(time.Since(begin).Seconds())
	switch operation {
	case "Configure", "Synchronize", "Shutdown":
	default:
		if outcome == "timeout" {
			return // an event: counted by TimedOut when the time was up
		}
	}
	m.invocations.WithLabelValues(plugin.String(), operation, outcome).Inc()
}

func result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, plug.ErrLost):
		return "lost"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, context.Canceled):
		return "canceled"
	default:
		return "rejected"
	}
}
