package status

import (
	"errors"
	"testing"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
)

func TestRuntimeVersion(t *testing.T) {
	for built, want := range map[string]string{
		"": unreleased, "(devel)": unreleased, "unknown": unreleased, "v1.2.3": "1.2.3", "v0.0.0-20260101-abc+dirty": "0.0.0-20260101-abc+dirty",
	} {
		if got := RuntimeVersion(built); got != want {
			t.Errorf("RuntimeVersion(%q) = %q, want %q", built, got, want)
		}
	}
}

func TestVersionHasNoEmptyField(t *testing.T) {
	v := Version(RuntimeVersion(""))
	if v.GetVersion() == "" || v.GetRuntimeName() != "crisp" || v.GetRuntimeVersion() == "" || v.GetRuntimeApiVersion() != "v1" {
		t.Errorf("Version = %v", v)
	}
}

func TestStatus(t *testing.T) {
	ready := []*criv1.RuntimeCondition{{Type: criv1.RuntimeReady, Status: true}, {Type: criv1.NetworkReady, Status: true}}
	for _, tt := range []struct {
		name             string
		node             *nodev1.GetStatusResponse
		failure          error
		runtime, network bool
	}{
		{"ready", &nodev1.GetStatusResponse{Conditions: ready}, nil, true, true},
		{"silent on the network", &nodev1.GetStatusResponse{Conditions: ready[:1]}, nil, true, false},
		{"away", nil, errors.New("no connection"), false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := map[string]*criv1.RuntimeCondition{}
			for _, c := range Status(tt.node, tt.failure).GetStatus().GetConditions() {
				got[c.GetType()] = c
			}
			for kind, want := range map[string]bool{criv1.RuntimeReady: tt.runtime, criv1.NetworkReady: tt.network} {
				c := got[kind]
				if c == nil || c.GetStatus() != want || (!want && (c.GetReason() == "" || c.GetMessage() == "")) {
					t.Errorf("condition %s = %v, want %v", kind, c, want)
				}
			}
		})
	}
}
