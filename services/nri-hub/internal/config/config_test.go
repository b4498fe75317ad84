package config_test

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	kit "github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

func TestExampleIsTheDefault(t *testing.T) {
	t.Parallel()
	var want bytes.Buffer
	if err := kit.Dump(&want, config.Default()); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../config.example.toml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.String(), string(got)); diff != "" {
		t.Errorf("config.example.toml is not what \"config default\" prints (-want +got):\n%s", diff)
	}
	cfg := config.Default()
	if err := kit.Load("../../config.example.toml", &cfg); err != nil {
		t.Error(err)
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	for want, spoil := range map[string]func(*config.Config){
		"version: ":          func(c *config.Config) { c.Version = 2 },
		"run_folder: ":       func(c *config.Config) { c.RunFolder = "run" },
		"launch.folder: ":    func(c *config.Config) { c.Launch.Folder = "" },
		"timeouts.request: ": func(c *config.Config) { c.Timeouts.Request = 0 },
		"runtime.name: ":     func(c *config.Config) { c.Runtime.Name = "" },
		"nri.socket.path: ":  func(c *config.Config) { c.NRI.Socket.Path = "nri.sock" },
	} {
		cfg := config.Default()
		spoil(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want it to name %q", err, want)
		}
	}
}
