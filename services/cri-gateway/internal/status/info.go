package status

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"

	"github.com/pelletier/go-toml/v2"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/config"
)

const hubUnavailable = "NRIHubUnavailable"

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
