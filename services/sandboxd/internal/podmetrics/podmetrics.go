// Package podmetrics turns readings into the metrics that kubelet offers as
// /metrics/cadvisor, with the names, labels and meanings that it has for its own readings.
//
// One table holds every metric with its description and its value, so what is described and
// what is sent cannot differ. The table never changes while a process runs. All of it is
// pure; who reads fills in the readings.
package podmetrics

import (
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels name what was measured. Pod metrics have no container and no image.
type Labels struct {
	// ID is the path of the cgroup, Name the id of the container.
	Container, ID, Image, Name, Namespace, Pod string
}

// keys are the names of Labels, in the order of values.
func keys() []string { return []string{"container", "id", "image", "name", "namespace", "pod"} }

func (l Labels) values(extra []string) []string {
	return append([]string{l.Container, l.ID, l.Image, l.Name, l.Namespace, l.Pod}, extra...)
}

// Layer is the use of a writable layer.
type Layer struct {
	// Filesystem is what it is on.
	Filesystem Filesystem
	// Used are the bytes of the layer, as of At.
	Used uint64
	At   time.Time
}

// Sample is what was read of a container or a pod. What is nil or empty gives no metrics.
type Sample struct {
	Labels Labels
	// Now is the time of the reading, Started when the container was started.
	Now, Started time.Time
	Cgroup       *Figures
	Processes    *Processes
	Interfaces   []Interface
	Layer        *Layer
	// DeviceName names a block device by its numbers, such as "/dev/sda".
	DeviceName func(major, minor uint64) string
}

// point is one value of a metric, with the values of the metric's own labels.
type point struct {
	labels []string
	value  uint64
	// at is set if the value was not read for this sample.
	at time.Time
}

// metric is a line of the table.
type metric struct {
	name, help string
	kind       criv1.MetricType
	labels     []string // beside those of Labels
	points     func(Sample) []point
}

// Table describes the metrics and makes them. It may be used concurrently.
type Table struct{ metrics []metric }

// New returns the table.
func New() *Table {
	t := &Table{}
	for _, part := range [][]metric{
		processor(), memory(), blockDevices(), filesystem(), network(), processes(), pressure(), lifetime(), spec(),
	} {
		t.metrics = append(t.metrics, part...)
	}
	return t
}

// Descriptors describes all metrics. The caller may keep them.
func (t *Table) Descriptors() []*criv1.MetricDescriptor {
	out := make([]*criv1.MetricDescriptor, 0, len(t.metrics))
	for _, m := range t.metrics {
		out = append(out, &criv1.MetricDescriptor{Name: m.name, Help: m.help, LabelKeys: append(keys(), m.labels...)})
	}
	return out
}

// Metrics returns the metrics of a sample.
func (t *Table) Metrics(s Sample) []*criv1.Metric {
	out := make([]*criv1.Metric, 0, len(t.metrics))
	for _, m := range t.metrics {
		for _, p := range m.points(s) {
			c := &criv1.Metric{
				Name: m.name, MetricType: m.kind, LabelValues: s.Labels.values(p.labels),
				Value: &criv1.UInt64Value{Value: p.value},
			}
			if !p.at.IsZero() {
				c.Timestamp = p.at.UnixNano()
			}
			out = append(out, c)
		}
	}
	return out
}

// counter and gauge make lines of the table whose value is a figure of the cgroup.
func counter(name, help string, value func(*Figures) uint64) metric {
	return metric{name: name, help: help, kind: criv1.MetricType_COUNTER, points: figure(value)}
}

func gauge(name, help string, value func(*Figures) uint64) metric {
	return metric{name: name, help: help, kind: criv1.MetricType_GAUGE, points: figure(value)}
}

func figure(value func(*Figures) uint64) func(Sample) []point {
	return func(s Sample) []point {
		if s.Cgroup == nil {
			return nil
		}
		return []point{{value: value(s.Cgroup)}}
	}
}

// seconds are whole ones: the protocol has no fractions.
func seconds(nanoseconds uint64) uint64 { return nanoseconds / uint64(time.Second) }
