package status

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"github.com/pelletier/go-toml/v2"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/config"
)

const (
	hubUnavailable = "NRIHubUnavailable"

	// PluginsReady is the condition that tells of the NRI plugins. Kubelet does not act on
	// it; what watches nodes can.
	PluginsReady = "NRIPluginsReady"

	pluginsMissing  = "NRIPluginsMissing"
	pluginsDegraded = "NRIPluginsDegraded"
)

// AddInfo adds what processes say of themselves to a verbose answer, by their names, in
// JSON. What cannot be written as JSON is replaced by the error.
func AddInfo(resp *criv1.StatusResponse, processes map[string]any) {
	info := maps.Clone(resp.GetInfo())
	if info == nil {
		info = make(map[string]string)
	}
	for name, said := range processes {
		text, err := json.Marshal(said)
		if err != nil {
			text, _ = json.Marshal(map[string]string{"error": err.Error()}) //nolint:errchkjson // strings only
		}
		info[name] = string(text)
	}
	resp.Info = info
}

// Config returns a configuration as its file shows it, keyed by the names in the file.
func Config(cfg any) any {
	var text bytes.Buffer
	tree := map[string]any{}
	err := config.Dump(&text, cfg)
	if err == nil {
		err = toml.Unmarshal(text.Bytes(), &tree)
	}
	if err != nil {
		return fmt.Sprintf("not readable: %v", err)
	}
	return tree
}

// HubAway makes a runtime that is ready not ready, because calls would be refused for the
// want of nri-hub.
func HubAway(resp *criv1.StatusResponse, failure error) {
	for _, c := range resp.GetStatus().GetConditions() {
		if c.GetType() == criv1.RuntimeReady && c.GetStatus() {
			c.Status, c.Reason, c.Message = false, hubUnavailable, failure.Error()
		}
	}
}

// AddPlugins adds the condition of the NRI plugins: failure says why the hub cannot be
// called, degraded and missing name plugins that do not answer and required ones that are
// away.
func AddPlugins(resp *criv1.StatusResponse, failure error, degraded, missing []string) {
	c := &criv1.RuntimeCondition{Type: PluginsReady, Status: true}
	switch {
	case failure != nil:
		c.Status, c.Reason, c.Message = false, hubUnavailable, failure.Error()
	case len(missing) > 0:
		c.Status, c.Reason, c.Message = false, pluginsMissing, "required plugins are away: "+strings.Join(missing, ", ")
	case len(degraded) > 0:
		c.Status, c.Reason, c.Message = false, pluginsDegraded, "plugins do not answer in time: "+strings.Join(degraded, ", ")
	}
	resp.Status.Conditions = append(resp.Status.Conditions, c)
}
