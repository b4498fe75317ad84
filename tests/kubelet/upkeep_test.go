//go:build kubelet

package kubelet

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/leak"
	"github.com/crisp-cri/crisp/tests/testenv"
)

// A log that kubelet rotates all the time has every line once.
func TestLogRotation(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		n := start(t, options{setup: testenv.Setup{Handler: handler}, configure: func(config map[string]any) {
			config["containerLogMaxSize"], config["containerLogMaxFiles"], config["containerLogMonitorInterval"] = "50Ki", 1000, "3s"
		}})
		s := n.story(t)
		const batches, size = 150, 400
		script := fmt.Sprintf("i=0; while [ $i -lt %d ]; do seq $((i*%d)) $((i*%d+%d)); sleep 0.2; i=$((i+1)); done; %s", batches, size, size, size-1, forever)
		p := s.runReady(pod("rotated", shell("main", script)))
		folder := filepath.Join(n.Path("podlogs"), fmt.Sprintf("%s_%s_%s", namespace, p.Name, p.UID), "main")
		var files []string
		eventually(t, "all lines are logged", func() error {
			tail, err := s.logs("rotated", "main", "tailLines=1")
			if err == nil && tail != fmt.Sprintln(batches*size-1) {
				err = fmt.Errorf("last line is %q", tail)
			}
			return err
		})
		eventually(t, "files", func() (err error) {
			files, err = filepath.Glob(folder + "/*")
			if err == nil && slices.ContainsFunc(files, func(name string) bool { return strings.HasSuffix(name, ".tmp") }) {
				err = fmt.Errorf("one is being packed: %v", files)
			}
			return err
		})
		// The file in use is named by the attempt, those before after it with their times.
		slices.SortFunc(files, func(a, b string) int { return strings.Compare(fileOrder(a), fileOrder(b)) })
		if len(files) < 5 {
			t.Errorf("kubelet rotated only into %v", files)
		}
		next := 0
		for _, path := range files {
			for line := range strings.Lines(unpacked(t, path)) {
				if want := fmt.Sprintf(" stdout F %d\n", next); !strings.HasSuffix(line, want) {
					t.Fatalf("%s: line %q, want one that ends with %q", filepath.Base(path), line, want)
				}
				next++
			}
		}
		if next != batches*size {
			t.Errorf("%d lines, want %d", next, batches*size)
		}
	})
}

// fileOrder sorts log files by age.
func fileOrder(path string) string {
	name := filepath.Base(path)
	if name == "0.log" {
		return "~"
	}
	return name
}

func unpacked(t *testing.T, path string) string {
	t.Helper()
	file, err := os.Open(path)
	must(t, err)
	defer func() { _ = file.Close() }()
	var reader io.Reader = file
	if strings.HasSuffix(path, ".gz") {
		reader, err = gzip.NewReader(file)
		must(t, err)
	}
	text, err := io.ReadAll(reader)
	must(t, err)
	return string(text)
}

// Images that nobody uses are collected, others and pinned ones stay.
func TestImageCollection(t *testing.T) {
	const staging = "gcr.io/k8s-staging-cri-tools/"
	pinned, used, mounted, unused := staging+"test-image-1:latest", busybox, staging+"test-image-2:latest", staging+"test-image-3:latest"
	n := start(t, options{setup: testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			settings.Set("image.pinned_images", []string{pinned})
		}
	}}})
	s := n.story(t)
	p := pod("user", shell("main", forever))
	p.Spec.Volumes = []corev1.Volume{{Name: "image", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: mounted}}}}
	everywhere(p, corev1.VolumeMount{Name: "image", MountPath: "/image"})
	s.runReady(p)
	for _, image := range []string{pinned, unused} {
		_, err := n.Images.PullImage(t.Context(), &criv1.PullImageRequest{Image: &criv1.ImageSpec{Image: image}})
		must(t, err)
	}
	n.stopKubelet()
	n.config["imageGCHighThresholdPercent"], n.config["imageGCLowThresholdPercent"], n.config["imageMinimumGCAge"] = 1, 0, "1s"
	n.startKubelet()
	present := func() (names []string, err error) {
		answer, err := n.Images.ListImages(t.Context(), &criv1.ListImagesRequest{})
		for _, image := range answer.GetImages() {
			names = append(names, image.GetRepoTags()...)
		}
		return names, err
	}
	// The first collection, at kubelet's start, finds no figures of the disk yet; the next is five minutes later.
	within(t, 5*time.Minute+patience, "collection", func() error {
		names, err := present()
		if err == nil && slices.Contains(names, unused) {
			err = fmt.Errorf("images are %v", names)
		}
		return err
	})
	names, err := present()
	must(t, err)
	for _, image := range []string{pinned, used, mounted} {
		if !slices.Contains(names, image) {
			t.Errorf("%s is gone, images are %v", image, names)
		}
	}
	if got := status(s.wait("user", ready), "main").RestartCount; got != 0 {
		t.Errorf("restarted %d times", got)
	}
}

// Of a container's ends kubelet keeps the last; a changed file replaces the pod; and of pods that
// were taken away nothing is left on the node.
func TestNothingIsLeft(t *testing.T) {
	n := start(t, options{})
	s := n.story(t)
	scope := n.LeakScope()
	// These are kubelet's own.
	scope.Ignore = append(scope.Ignore, regexp.MustCompile(`^cgroup: .*/kubepods(/besteffort|/burstable)?$`), regexp.MustCompile(`^socket: unix /var/lib/kubelet/`))
	before, err := leak.Take(t.Context(), scope)
	must(t, err)

	s.run(pod("crashing", shell("main", "exit 1")))
	s.wait("crashing", func(p corev1.Pod) error {
		if got := status(p, "main").RestartCount; got < 4 {
			return fmt.Errorf("restarted %d times", got)
		}
		return nil
	})
	eventually(t, "collection of containers", func() error {
		answer, err := n.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{Filter: &criv1.ContainerFilter{
			LabelSelector: map[string]string{"io.kubernetes.pod.name": podName("crashing")},
		}})
		if err == nil && len(answer.GetContainers()) > 2 {
			err = fmt.Errorf("%d containers are kept", len(answer.GetContainers()))
		}
		return err
	})

	first := pod("changing", shell("main", "echo $WORD; "+forever))
	first.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "WORD", Value: "one"}}
	one := s.runReady(first)
	s.wantLogs("changing", "main", "", "one\n")
	second := first.DeepCopy()
	second.Spec.Containers[0].Env[0].Value = "two"
	second.Spec.Containers[0].Image = "gcr.io/k8s-staging-cri-tools/test-image-2:latest"
	must(t, s.write(second))
	two := s.wait("changing", func(p corev1.Pod) error {
		if p.UID == one.UID {
			return fmt.Errorf("it is still pod %s", p.UID)
		}
		return ready(p)
	})
	s.wantLogs("changing", "main", "", "two\n")
	if c := status(two, "main"); c.Image != second.Spec.Containers[0].Image || c.RestartCount != 0 {
		t.Errorf("the new container is %+v", c)
	}

	// With an identity of its own the pod stays, and the container is made anew.
	fixed := pod("fixed", shell("main", "echo one; "+forever))
	fixed.UID = "0a1b2c3d-0000-4000-8000-000000000001"
	kept := s.runReady(fixed)
	fixed.Spec.Containers[0].Image = "gcr.io/k8s-staging-cri-tools/test-image-2:latest"
	must(t, s.write(fixed))
	s.wait("fixed", func(p corev1.Pod) error {
		if c := status(p, "main"); c.Image != fixed.Spec.Containers[0].Image || p.UID != kept.UID {
			return fmt.Errorf("pod %s has the image %s", p.UID, c.Image)
		}
		return ready(p)
	})

	for _, name := range []string{"crashing", "changing", "fixed"} {
		s.remove(name)
	}
	eventually(t, "kubelet has removed all pods", func() error {
		pods, err := n.CRI.ListPodSandbox(t.Context(), &criv1.ListPodSandboxRequest{})
		if err == nil && len(pods.GetItems()) > 0 {
			err = fmt.Errorf("%d are there", len(pods.GetItems()))
		}
		return err
	})
	left, err := leak.Settle(t.Context(), before, scope, time.Minute)
	must(t, err)
	if len(left) > 0 {
		t.Error(leak.Report(left))
	}
	n.checkState()
}

// checkState compares sandboxd's records with the machine.
func (n *node) checkState() {
	n.t.Helper()
	program, err := testenv.Binary("sandboxd")
	must(n.t, err)
	out, err := exec.CommandContext(n.t.Context(), program, "check-state", "--network", "--config", n.ConfigFile(testenv.Sandboxd), "--wait", "30s").CombinedOutput()
	if err != nil {
		n.t.Errorf("check-state: %v:\n%s", err, out)
	}
}
