//go:build kubelet

package kubelet

import (
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// With the feature gates that change what kubelet asks of the runtime pods run and end as they should.
func TestFeatureGates(t *testing.T) { //nolint:tparallel // Nodes take turns, since a kubelet has ports.
	n := start(t, options{gates: map[string]bool{
		"EventedPLEG": true, "CRIListStreaming": true, "ContainerStopSignals": true, "VolumeBindMountOptions": true,
		"ImageVolumeWithDigest": true, "RuntimeClassInImageCriApi": true, "InPlacePodVerticalScalingExclusiveCPUs": true,
		"PodAndContainerStatsFromCRI": true,
	}, expected: append([]string{
		// What kubelet knows by events is older than what it does while their stream is cut.
		"code = AlreadyExists",
		// Its processors' manager meets containers that have ended.
		"code = FailedPrecondition desc = update container",
	}, restartErrors...), configure: func(config map[string]any) {
		config["cpuManagerPolicy"], config["reservedSystemCPUs"] = "static", "0"
	}})
	t.Run("events", func(t *testing.T) { events(n.story(t)) })
	n.stories(t, map[string]func(*story){
		"stop-signal": stopSignal, "mount-options": mountOptions, "image-digest": imageDigest, "exclusive": exclusive,
	})
}

func stopSignal(s *story) {
	folder := s.Path("stop-signal")
	must(s.t, os.MkdirAll(folder, 0o777))
	main := shell("main", "trap 'echo USR1 >>/common/notes; exit 0' USR1; trap 'echo TERM >>/common/notes; exit 0' TERM; sleep 100000 & wait")
	signal := corev1.SIGUSR1
	main.Lifecycle = &corev1.Lifecycle{StopSignal: &signal}
	p := pod("stop-signal", main)
	p.Spec.OS = &corev1.PodOS{Name: corev1.Linux}
	p.Spec.Volumes = []corev1.Volume{hostFolder("work", folder)}
	everywhere(p, corev1.VolumeMount{Name: "work", MountPath: "/common"})
	got := s.runReady(p)
	if c := status(got, "main"); c.StopSignal == nil || *c.StopSignal != signal {
		s.t.Errorf("kubelet says of the signal %v", c.StopSignal)
	}
	s.remove("stop-signal")
	if notes, err := os.ReadFile(folder + "/notes"); err != nil || string(notes) != "USR1\n" {
		s.t.Errorf("notes are %q, %v", notes, err)
	}
}

func mountOptions(s *story) {
	p := pod("mount-options", shell("main", "cp /bin/true /volume/true; "+forever))
	p.Spec.Volumes = []corev1.Volume{{Name: "volume", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	everywhere(p, corev1.VolumeMount{Name: "volume", MountPath: "/volume", BindMountOptions: []string{"noexec", "nodev", "nosuid"}})
	s.runReady(p)
	line := mountLine(s.do("mount-options", "main", "cat", "/proc/mounts"), "/volume")
	for _, option := range []string{"noexec", "nodev", "nosuid"} {
		if !strings.Contains(line, option) {
			s.t.Errorf("%s is missing in %q", option, line)
		}
	}
	if out := s.script("mount-options", "main", "/volume/true 2>&1 || true"); !strings.Contains(out, "Permission denied") {
		s.t.Errorf("a program of the volume said %q", out)
	}
}

// kubelet 1.37.2 asks for the image of a volume by the name of a mount, which no runtime tells it: what it asks is looked at here.
func imageDigest(s *story) {
	p := pod("image-digest", shell("main", forever))
	p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "gcr.io/k8s-staging-cri-tools/test-image-1:latest"}}}}
	everywhere(p, corev1.VolumeMount{Name: "data", MountPath: "/data"})
	got := s.runReady(p)
	answer, err := s.CRI.ContainerStatus(s.t.Context(), &criv1.ContainerStatusRequest{ContainerId: strings.TrimPrefix(status(got, "main").ContainerID, "crisp://")})
	must(s.t, err)
	for _, m := range answer.GetStatus().GetMounts() {
		if m.GetContainerPath() == "/data" && strings.Contains(m.GetImage().GetImageRef(), "sha256:") {
			return
		}
	}
	s.t.Errorf("mounts are %v", answer.GetStatus().GetMounts())
}

// Kubelet hears of starts and ends by the runtime's events, also when the gateway or the bus was away.
func events(s *story) {
	connected := func() (count int) {
		text, err := s.get("/metrics")
		must(s.t, err)
		_, _ = fmt.Sscan(field(text, "kubelet_evented_pleg_connection_success_count"), &count)
		return count
	}
	for i, p := range []testenv.Process{testenv.Gateway, testenv.EventBus, testenv.Sandboxd} {
		eventually(s.t, "connection for events", func() error {
			if got := connected(); got < 1 {
				return fmt.Errorf("%d were made", got)
			}
			return nil
		})
		name := fmt.Sprintf("events-%d", i)
		once := pod(name, shell("main", "echo done"))
		once.Spec.RestartPolicy = corev1.RestartPolicyNever
		s.run(once)
		s.wait(name, terminated("main", "Completed", 0))
		again := pod(name+"-again", shell("main", "sleep 1; exit 2"))
		s.run(again)
		s.wait(name+"-again", func(p corev1.Pod) error {
			if got := status(p, "main").RestartCount; got < 1 {
				return fmt.Errorf("restarted %d times", got)
			}
			return terminated("main", "Error", 2)(p)
		})
		must(s.t, s.Restart(s.t.Context(), p))
	}
}

// A pod of whole processors has its own.
func exclusive(s *story) {
	p := pod("exclusive", shell("main", forever))
	p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1"), "memory": resource.MustParse("64Mi")}
	got := s.runReady(p)
	if got.Status.QOSClass != corev1.PodQOSGuaranteed {
		s.t.Errorf("the class is %s", got.Status.QOSClass)
	}
	s.wantDo("1\n", "exclusive", "main", "cat", "/sys/fs/cgroup/cpuset/cpuset.cpus")
}
