package classes

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
)

func write(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "classes.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// The library has one configuration for the process, so the cases share one test.
func TestBlockIO(t *testing.T) {
	var c Classes
	slow := map[string]string{"blockio.resources.beta.kubernetes.io/container.app": "slow"}
	if got, err := c.BlockIO("app", nil, nil); got != nil || err != nil {
		t.Errorf("no class: %v, %v", got, err)
	}
	if _, err := c.BlockIO("app", nil, slow); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("nothing configured: error %v", err)
	}
	if err := c.Load("", write(t, "Classes:\n  slow:\n  - Weight: 100\n")); err != nil {
		t.Fatal(err)
	}
	for _, pod := range []map[string]string{slow, {"blockio.resources.beta.kubernetes.io/pod": "slow"}} {
		got, err := c.BlockIO("app", nil, pod)
		if err != nil || got == nil || got.Weight == nil || *got.Weight != 100 {
			t.Errorf("%v: %+v, %v", pod, got, err)
		}
	}
	if got, err := c.BlockIOClass("slow"); err != nil || got == nil || *got.Weight != 100 {
		t.Errorf("by name: %+v, %v", got, err)
	}
	if got, err := c.BlockIOClass("fast"); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("unknown name: %v, %v", got, err)
	}
	if got, err := c.BlockIO("app", map[string]string{"io.kubernetes.cri.blockio-class": "fast"}, slow); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("unknown class of the container wins: %v, %v", got, err)
	}
	if got, err := c.BlockIO("other", nil, slow); got != nil || err != nil {
		t.Errorf("class of another container: %v, %v", got, err)
	}
	if err := c.Load("", write(t, "Classes: [\n")); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("broken file: error %v", err)
	}
	if got, err := c.BlockIO("app", nil, slow); err != nil || got == nil {
		t.Errorf("after a broken file: %v, %v", got, err)
	}
	if err := c.Load("", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := c.BlockIO("app", nil, slow); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("no longer configured: error %v", err)
	}
}

func TestRDTWithoutTheHardware(t *testing.T) {
	if _, err := os.Stat("/sys/fs/resctrl/schemata"); err == nil {
		t.Skip("this machine has RDT")
	}
	var c Classes
	if got, err := c.RDT("app", nil, nil); got != nil || err != nil {
		t.Errorf("no class: %v, %v", got, err)
	}
	if _, err := c.RDT("app", nil, map[string]string{"rdt.resources.beta.kubernetes.io/pod": "gold"}); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("nothing configured: error %v", err)
	}
	if _, err := c.RDTClass("gold"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("nothing configured, by name: error %v", err)
	}
	if err := c.Load(write(t, "partitions: {}\n"), ""); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("no hardware: error %v", err)
	}
}
