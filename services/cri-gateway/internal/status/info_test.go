package status

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	nodev1 "github.com/crisp-cri/crisp/proto/gen/crisp/node/v1"
	"github.com/crisp-cri/crisp/services/internal/config"
)

func TestInfoIsJSONWithTheNamesOfTheFile(t *testing.T) {
	type section struct {
		Wait config.Duration `toml:"wait_time"`
	}
	type file struct {
		Part section `toml:"part"`
	}
	resp := Status(&nodev1.GetStatusResponse{Info: map[string]string{"sandboxd": "{}"}}, nil)
	AddInfo(resp, map[string]any{
		"gateway": map[string]any{"config": Config(file{section{config.Duration(5 * time.Second)}})},
		"broken":  func() {},
	})
	if got := resp.GetInfo()["gateway"]; got != `{"config":{"part":{"wait_time":"5s"}}}` {
		t.Errorf("gateway says %s", got)
	}
	for name, text := range resp.GetInfo() {
		if !json.Valid([]byte(text)) {
			t.Errorf("%s says %q, which is no JSON", name, text)
		}
	}
	if len(resp.GetInfo()) != 3 {
		t.Errorf("info is %v, want all three", resp.GetInfo())
	}
}

func TestHubAway(t *testing.T) {
	ready := &criv1.RuntimeCondition{Type: criv1.RuntimeReady, Status: true}
	resp := Status(&nodev1.GetStatusResponse{Conditions: []*criv1.RuntimeCondition{ready}}, nil)
	HubAway(resp, errors.New("no hub"))
	if c := resp.GetStatus().GetConditions()[0]; c.GetStatus() || c.GetReason() != hubUnavailable || c.GetMessage() != "no hub" {
		t.Errorf("condition %v", c)
	}
	away := Status(nil, errors.New("no sandboxd"))
	HubAway(away, errors.New("no hub"))
	if c := away.GetStatus().GetConditions()[0]; c.GetReason() != unreachable {
		t.Errorf("condition %v, want the first trouble", c)
	}
}

func TestPluginsCondition(t *testing.T) {
	t.Parallel()
	for want, tt := range map[string]struct {
		failure           error
		degraded, missing []string
	}{
		"true":                     {},
		"false NRIHubUnavailable":  {failure: errors.New("away"), missing: []string{"a"}},
		"false NRIPluginsMissing":  {degraded: []string{"10-b"}, missing: []string{"a"}},
		"false NRIPluginsDegraded": {degraded: []string{"10-b"}},
	} {
		resp := Status(&nodev1.GetStatusResponse{}, nil)
		before := len(resp.GetStatus().GetConditions())
		AddPlugins(resp, tt.failure, tt.degraded, tt.missing)
		all := resp.GetStatus().GetConditions()
		if len(all) != before+1 {
			t.Fatalf("conditions are %v", all)
		}
		c := all[before]
		if got := strings.TrimSpace(fmt.Sprint(c.GetStatus(), " ", c.GetReason())); got != want || c.GetType() != PluginsReady {
			t.Errorf("condition is %v, want %s", c, want)
		}
	}
}
