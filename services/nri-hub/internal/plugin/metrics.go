package plugin

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// maxLabelled is how many plugins have metrics of their own. Whoever may connect chooses its name,
// and could connect again and again with others.
const maxLabelled = 256

// Metrics counts what plugins are asked and how they answer, for those that were called last.
// It is safe for concurrent use.
type Metrics struct {
	invocations *prometheus.CounterVec
	latency     *prometheus.HistogramVec
	active      prometheus.Gauge
	degraded    prometheus.Gauge

	// mu guards all below.
	mu     sync.Mutex
	names  map[string]*list.Element
	latest *list.List // of names, the one that was called last in front
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
		names: make(map[string]*list.Element), latest: list.New(),
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
	m.mu.Lock()
	defer m.mu.Unlock()
	m.invocations.WithLabelValues(m.label(plugin), e.PrettyName(), "timeout").Inc()
}

// label is the plugin's name; the plugin that was called least lately loses its metrics for it if
// there are too many. mu is held, and on until the name is used.
func (m *Metrics) label(plugin plug.ID) string {
	name := plugin.String()
	if e := m.names[name]; e != nil {
		m.latest.MoveToFront(e)
		return name
	}
	m.names[name] = m.latest.PushFront(name)
	if oldest := m.latest.Back(); m.latest.Len() > maxLabelled {
		gone, _ := m.latest.Remove(oldest).(string)
		delete(m.names, gone)
		m.invocations.DeletePartialMatch(prometheus.Labels{"plugin": gone})
		m.latency.DeletePartialMatch(prometheus.Labels{"plugin": gone})
	}
	return name
}

func (m *Metrics) called(plugin plug.ID, operation string, begin time.Time, outcome string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := m.label(plugin)
	m.latency.WithLabelValues(name, operation).Observe(time.Since(begin).Seconds())
	switch operation {
	case "Configure", "Synchronize", "Shutdown":
	default:
		if outcome == "timeout" {
			return // an event: counted by TimedOut when the time was up
		}
	}
	m.invocations.WithLabelValues(name, operation, outcome).Inc()
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
