//go:build integration

package image

import (
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/prometheus/client_golang/prometheus"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/progress"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
)

// values are the values of counters and gauges, and the counts of histograms, by name and label.
func values(t *testing.T, reg prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "crisp_sandboxd_image_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			switch f.GetType().String() {
			case "COUNTER":
				out[name] = m.GetCounter().GetValue()
			case "GAUGE":
				out[name] = m.GetGauge().GetValue()
			case "HISTOGRAM":
				out[name] = float64(m.GetHistogram().GetSampleCount())
			default:
				t.Errorf("%s is of type %v", name, f.GetType())
			}
		}
	}
	return out
}

func TestPullMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	metrics := progress.NewMetrics(reg)
	n := newNode(t, func(c *Config, sc *storage.Config) { c.Metrics, sc.Collected = metrics, metrics.Collected })
	source := imagetest.NewRegistry(t)
	base := imagetest.Layer(t, imagetest.File{Name: "base", Body: strings.Repeat("base", 10_000)})
	top := func(mark string) v1.Layer { return imagetest.Layer(t, imagetest.File{Name: "top", Body: mark}) }
	first, second := top("1"), top("second")
	size := func(l v1.Layer) float64 {
		s, err := l.Size()
		if err != nil {
			t.Fatal(err)
		}
		return float64(s)
	}
	n.mustPull(source.Push(t, "app:1", imagetest.Image(t, v1.Config{}, base, first)))
	again := source.Push(t, "app:2", imagetest.Image(t, v1.Config{}, base, second))
	n.mustPull(again)
	n.mustPull(again)
	if _, err := n.pull(source.Host + "/nothing:1"); err == nil {
		t.Error("an image came from nowhere")
	}
	got := values(t, reg)
	for name, want := range map[string]float64{
		"pulls_in_progress": 0, "pulls_total done": 3, "pulls_total failed": 1,
		"pull_duration_seconds": 3, "pull_throughput_bytes_per_second": 2,
		"layers_total fetched": 3, "layers_total reused": 3,
		"layer_bytes_total fetched": size(base) + size(first) + size(second),
		"layer_bytes_total reused":  2*size(base) + size(second),
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v, want %v", name, v, want)
		}
	}
	before := values(t, reg)
	if err := n.Remove(t.Context(), &criv1.ImageSpec{Image: again}); err != nil {
		t.Fatal(err)
	}
	after := values(t, reg)
	if after["collections_total done"] <= before["collections_total done"] || after["collections_total failed"] != 0 || after["collection_duration_seconds"] == 0 {
		t.Errorf("collections: %v, before %v", after, before)
	}
}
