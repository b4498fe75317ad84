//go:build integration

package e2e

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// Containers run from images of which only the unpacked layers are kept, also after a restart.
func TestUnpackedLayersAreDiscarded(t *testing.T) {
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			settings.Set("image.discard_unpacked_layers", true)
		}
	}})
	s.pull(busybox)
	layers, err := native(t, busybox).Layers()
	must(t, err)
	eventually(t, "the layers are given up", func() error {
		for _, layer := range layers {
			digest, err := layer.Digest()
			must(t, err)
			found, err := filepath.Glob(s.Path("lib", "images", "content", "blobs", "sha256", digest.Hex))
			must(t, err)
			if len(found) > 0 {
				return fmt.Errorf("blob %s is still there", digest)
			}
		}
		return nil
	})
	pod, config := s.pod("discard")
	if code := s.waitExit(s.container(pod, config, containerConfig("before", "true"))).GetExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	if code := s.waitExit(s.container(pod, config, containerConfig("after", "true"))).GetExitCode(); code != 0 {
		t.Errorf("exit code after a restart %d", code)
	}
}
