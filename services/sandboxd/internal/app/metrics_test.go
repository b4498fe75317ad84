package app

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/internal/telemetry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// halfNetwork attaches, and fails to detach.
type halfNetwork struct{ port.Network }

func (halfNetwork) Attach(context.Context, pod.NetworkRequest) (pod.NetworkResult, error) {
	return pod.NetworkResult{}, nil
}

func (halfNetwork) Detach(context.Context, pod.NetworkRequest, []byte) error {
	return errors.New("down")
}

func TestMetrics(t *testing.T) {
	tel, err := telemetry.New(t.Context(), telemetry.Config{Service: "sandboxd", Log: telemetry.DefaultLogConfig(), Trace: telemetry.DefaultTraceConfig()}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	m := newMetrics(tel)
	m.ended(pod.ReasonOOMKilled)
	n := meteredNetwork{Network: halfNetwork{}, metrics: m}
	if _, err := n.Attach(t.Context(), pod.NetworkRequest{}); err != nil {
		t.Fatal(err)
	}
	if err := n.Detach(t.Context(), pod.NetworkRequest{}, nil); err == nil {
		t.Error("the error was kept back")
	}
	families, err := tel.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, one := range f.GetMetric() {
			name := f.GetName()
			for _, l := range one.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = one.GetCounter().GetValue() + float64(one.GetHistogram().GetSampleCount())
		}
	}
	want := map[string]float64{
		"crisp_sandboxd_container_ends_total OOMKilled":            1,
		"crisp_sandboxd_network_operation_duration_seconds attach": 1,
		"crisp_sandboxd_network_operation_duration_seconds detach": 1,
		"crisp_sandboxd_network_operation_failures_total detach":   1,
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			delete(got, name) // of the process
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, ok := got["crisp_sandboxd_network_operation_failures_total attach"]; ok {
		t.Error("an attachment that worked is a failure")
	}
}
