package progress

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics say how pulls go. Joined pulls are one. A Metrics is safe for concurrent use.
type Metrics struct {
	running    prometheus.Gauge
	ended      *prometheus.CounterVec // by result
	seconds    prometheus.Histogram
	throughput prometheus.Histogram
	bytes      *prometheus.CounterVec // by origin
	layers     *prometheus.CounterVec // by origin
	collected  *prometheus.CounterVec // by result
	collecting prometheus.Histogram
}

// Where layers come from.
const (
	originFetched = "fetched"
	originReused  = "reused"
)

// NewMetrics registers the metrics of an image service; without a registry they are nowhere.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		running: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "crisp_sandboxd_image_pulls_in_progress", Help: "Pulls that run now.",
		}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_image_pulls_total", Help: "Pulls that ended, by result. Requests that joined a pull are one with it.",
		}, []string{"result"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "crisp_sandboxd_image_pull_duration_seconds", Help: "Time that successful pulls took.",
			Buckets: prometheus.ExponentialBuckets(0.125, 2, 14),
		}),
		throughput: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "crisp_sandboxd_image_pull_throughput_bytes_per_second", Help: "Bytes fetched over the time of the pull, of successful pulls that fetched some.",
			Buckets: prometheus.ExponentialBuckets(64<<10, 2, 16),
		}),
		bytes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_image_layer_bytes_total", Help: "Compressed bytes of the layers of successful pulls, by whether they were fetched or there already.",
		}, []string{"origin"}),
		layers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_image_layers_total", Help: "Layers of successful pulls, by whether they were fetched or there already.",
		}, []string{"origin"}),
		collected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "crisp_sandboxd_image_collections_total", Help: "Collections of blobs and layers that nothing needs, by result: failed ones have left something.",
		}, []string{"result"}),
		collecting: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "crisp_sandboxd_image_collection_duration_seconds", Help: "Time that collections took.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 10),
		}),
	}
	if reg != nil {
		reg.MustRegister(m.running, m.ended, m.seconds, m.throughput, m.bytes, m.layers, m.collected, m.collecting)
	}
	return m
}

// Collected counts a collection of the storage.
func (m *Metrics) Collected(took time.Duration, err error) {
	result := "done"
	if err != nil {
		result = "failed"
	}
	m.collected.WithLabelValues(result).Inc()
	m.collecting.Observe(took.Seconds())
}

// Begin counts a pull; what it returns is called with its outcome.
func (m *Metrics) Begin(steps *Pull) func(err error) {
	start := time.Now()
	m.running.Inc()
	return func(err error) {
		m.running.Dec()
		if err != nil {
			m.ended.WithLabelValues("failed").Inc()
			return
		}
		m.ended.WithLabelValues("done").Inc()
		took := time.Since(start)
		m.seconds.Observe(took.Seconds())
		fetched := steps.count(m)
		if fetched > 0 {
			m.throughput.Observe(float64(fetched) / took.Seconds())
		}
	}
}

// count tells of the layers of a finished pull and returns how many bytes were fetched.
func (p *Pull) count(m *Metrics) (fetched int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, b := range p.blobs {
		if i == 0 {
			continue // the configuration
		}
		origin := originReused
		if p.brought[b.Digest] {
			origin = originFetched
			fetched += b.Size
		}
		m.layers.WithLabelValues(origin).Inc()
		m.bytes.WithLabelValues(origin).Add(float64(b.Size))
	}
	return fetched
}
