package app

import (
	"strings"
	"testing"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	if err := Check(cfg); err != nil {
		t.Error(err)
	}
	cfg.Runtime.DefaultSysctls = map[string]string{"net.core.somaxconn": "1", "kernel.shmmax": "1", "kernel.pid_max": "1", "vm.swappiness": "1"}
	err := Check(cfg)
	if err == nil || !strings.Contains(err.Error(), "kernel.pid_max") || !strings.Contains(err.Error(), "vm.swappiness") || strings.Contains(err.Error(), "shmmax") {
		t.Errorf("%v, want an error for each sysctl of no namespace", err)
	}
}
