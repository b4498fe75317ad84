package streams

import "github.com/prometheus/client_golang/prometheus"

// descriptions of the metrics of a stream.
type descriptions struct {
	up, messages, bytes, consumers, first, last, pending *prometheus.Desc
}

// collector shows what the keeper saw last; it asks nobody.
type collector struct {
	keeper *Keeper
	desc   descriptions
}

// Collector returns the metrics of the stream.
func (k *Keeper) Collector() prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("crisp_eventbus_"+name, help, labels, prometheus.Labels{"stream": k.cfg.Name})
	}
	return collector{keeper: k, desc: descriptions{
		up:        desc("stream_up", "1 if the last check of the stream succeeded."),
		messages:  desc("stream_messages", "Events in the stream."),
		bytes:     desc("stream_bytes", "Bytes that the stream takes."),
		consumers: desc("stream_consumers", "Consumers of the stream."),
		first:     desc("stream_first_sequence", "Sequence of the oldest event."),
		last:      desc("stream_last_sequence", "Sequence of the newest event."),
		pending:   desc("consumer_pending_messages", "Events that a durable consumer has not received yet.", "consumer"),
	}}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.desc.up, c.desc.messages, c.desc.bytes, c.desc.consumers, c.desc.first, c.desc.last, c.desc.pending,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) {
	c.keeper.mu.Lock()
	info, durable, err := c.keeper.info, c.keeper.durable, c.keeper.err
	c.keeper.mu.Unlock()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	up := 0.0
	if err == nil {
		up = 1
	}
	gauge(c.desc.up, up)
	if info == nil {
		return
	}
	gauge(c.desc.messages, float64(info.State.Msgs))
	gauge(c.desc.bytes, float64(info.State.Bytes))
	gauge(c.desc.consumers, float64(info.State.Consumers))
	gauge(c.desc.first, float64(info.State.FirstSeq))
	gauge(c.desc.last, float64(info.State.LastSeq))
	for _, d := range durable {
		gauge(c.desc.pending, float64(d.NumPending), d.Name)
	}
}
