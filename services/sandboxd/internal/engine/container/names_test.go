package container

import (
	"testing"

	imagespec "github.com/opencontainers/image-spec/specs-go/v1"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestStopSignal(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		asked       criv1.Signal
		image, want string
	}{
		{0, "", "SIGTERM"},
		{0, "SIGWINCH", "SIGWINCH"},
		{criv1.Signal_SIGNAL_SIGHUP, "SIGWINCH", "SIGHUP"},
		{criv1.Signal_SIGNAL_SIGRTMINPLUS3, "", "SIGRTMIN+3"},
		{criv1.Signal_SIGNAL_SIGRTMAXMINUS1, "", "SIGRTMAX-1"},
		{criv1.Signal_SIGNAL_SIGRTMIN, "", "SIGRTMIN"},
	} {
		img := pod.Image{Config: imagespec.ImageConfig{StopSignal: tt.image}}
		if got := stopSignal(&criv1.ContainerConfig{StopSignal: tt.asked}, img); got != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
	}
}
