package testenv

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// PodSubnet is the address range of the pods of each System.
const PodSubnet = "10.88.0.0/16"

// writeNetwork configures a bridge network whose plugin is called through a
// wrapper that logs each call and can be made slow.
func (l layout) writeNetwork(pluginDir string) error {
	network := map[string]any{
		"cniVersion": "1.0.0",
		"name":       "crisp-test",
		"plugins": []any{
			map[string]any{
				"type": "logged-bridge", "bridge": "crisp0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
				"ipam": map[string]any{
					"type": "host-local", "dataDir": l.path("addresses"),
					"ranges": []any{[]any{map[string]any{"subnet": PodSubnet}}},
					"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
				},
			},
			map[string]any{"type": "portmap", "capabilities": map[string]any{"portMappings": true}, "snat": true},
		},
	}
	text, err := json.MarshalIndent(network, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(l.path("net.d", "10-test.conflist"), text, 0o644); err != nil {
		return err
	}
	wrapper := fmt.Sprintf(`#!/bin/sh
# Logs the call; an ADD first waits as long as the file "slow" says.
echo "$CNI_COMMAND $CNI_CONTAINERID" >> %[1]s/calls
if [ "$CNI_COMMAND" = ADD ] && [ -s %[1]s/slow ]; then sleep "$(cat %[1]s/slow)"; fi
exec %[2]s "$@"
`, l.path("cni"), filepath.Join(pluginDir, "bridge"))
	return os.WriteFile(l.path("cni", "logged-bridge"), []byte(wrapper), 0o755)
}

// SlowNetwork makes each following CNI ADD take d longer; zero ends that.
func (s *System) SlowNetwork(d time.Duration) error {
	text := ""
	if d > 0 {
		text = fmt.Sprintf("%g", d.Seconds())
	}
	return os.WriteFile(s.layout.path("cni", "slow"), []byte(text), 0o644)
}

// NetworkCalls gives the calls of the bridge plugin so far, as "COMMAND id".
func (s *System) NetworkCalls() ([]string, error) {
	text, err := os.ReadFile(s.layout.path("cni", "calls"))
	if os.IsNotExist(err) {
		return nil, nil
	}
	return strings.Fields(strings.ReplaceAll(strings.TrimSpace(string(text)), " ", ":")), err
}
