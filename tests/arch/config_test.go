package arch

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// The example configurations are accepted by the programs they are for.
func TestExampleConfigurationsPassTheirCheck(t *testing.T) {
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []testenv.Process{testenv.EventBus, testenv.Sandboxd, testenv.NRIHub, testenv.Gateway} {
		t.Run(string(p), func(t *testing.T) {
			program, err := testenv.Binary(string(p))
			if err != nil {
				t.Skip(err)
			}
			example := filepath.Join(root, "services", string(p), "config.example.toml")
			if _, err := os.Stat(example); err != nil {
				t.Fatal(err)
			}
			out, err := exec.CommandContext(t.Context(), program, "config", "check", "--config", example).CombinedOutput()
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}
