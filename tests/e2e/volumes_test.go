//go:build integration

package e2e

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

// entry is a file of a layer. A zero kind is a regular file.
type entry struct {
	name, body, link string
	kind             byte
	mode             int64
	uid              int
}

func layerOf(t *testing.T, entries ...entry) v1.Layer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, Uid: e.uid, Gid: e.uid, Size: int64(len(e.body))}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		must(t, w.WriteHeader(h))
		_, err := w.Write([]byte(e.body))
		must(t, err)
	}
	must(t, w.Close())
	data := buf.Bytes()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	must(t, err)
	return layer
}

// derived is the busybox image with more layers and a changed configuration.
func derived(t *testing.T, name string, change func(*v1.Config), layers ...v1.Layer) fixture.Image {
	t.Helper()
	all, err := images()
	must(t, err)
	var base v1.Image
	for _, img := range all {
		if img.Name != busybox {
			continue
		}
		manifest, err := img.Index.IndexManifest()
		must(t, err)
		for _, m := range manifest.Manifests {
			if m.Platform != nil && m.Platform.Architecture == runtime.GOARCH {
				base, err = img.Index.Image(m.Digest)
				must(t, err)
			}
		}
	}
	if base == nil {
		t.Fatal("no base image")
	}
	made, err := mutate.AppendLayers(base, layers...)
	must(t, err)
	config, err := made.ConfigFile()
	must(t, err)
	if change != nil {
		config = config.DeepCopy()
		change(&config.Config)
		made, err = mutate.ConfigFile(made, config)
		must(t, err)
	}
	return fixture.Image{Name: name, Plain: made}
}

// startWith starts a system whose registry has further images, which are pulled.
func startWith(t *testing.T, setup testenv.Setup, more ...fixture.Image) *system {
	t.Helper()
	all, err := images()
	must(t, err)
	setup.Images = append(slices.Clone(all), more...)
	s := &system{System: testenv.Start(t, setup), t: t}
	s.pull(busybox)
	for _, img := range more {
		s.pull(img.Name)
	}
	return s
}

// create creates a container and gives what came of it.
func (s *system) create(pod string, podConfig *criv1.PodSandboxConfig, config *criv1.ContainerConfig) (string, error) {
	answer, err := s.CRI.CreateContainer(s.t.Context(), &criv1.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig})
	return answer.GetContainerId(), err
}

func (s *system) start(id string) error {
	_, err := s.CRI.StartContainer(s.t.Context(), &criv1.StartContainerRequest{ContainerId: id})
	return err
}

func (s *system) remove(id string) {
	s.t.Helper()
	_, err := s.CRI.RemoveContainer(s.t.Context(), &criv1.RemoveContainerRequest{ContainerId: id})
	must(s.t, err)
}

// mountsBelow counts the mounts of the node below one of the system's folders.
func (s *system) mountsBelow(parts ...string) int {
	s.t.Helper()
	info, err := os.ReadFile("/proc/self/mountinfo")
	must(s.t, err)
	return strings.Count(string(info), " "+s.Path(parts...)+"/")
}

const dataImage = "registry.k8s.io/crisp-tests/data:1"

func dataLayer(t *testing.T) v1.Layer {
	t.Helper()
	return layerOf(t, entry{name: "data/", kind: tar.TypeDir, mode: 0o750, uid: 12}, entry{name: "data/file", body: "content", mode: 0o640, uid: 12},
		entry{name: "data/run", body: "#!/bin/sh\necho ran\n"}, entry{name: "data/out", kind: tar.TypeSymlink, link: "../../../../../../../etc"})
}

func imageMount(image, at, subPath string, options ...string) *criv1.Mount {
	return &criv1.Mount{ContainerPath: at, Readonly: true, Image: &criv1.ImageSpec{Image: image}, ImageSubPath: subPath, MountOptions: options}
}

// An image is a volume: shared by containers, read-only, in use as long as a container has
// it, over restarts, and gone with the last one.
func TestImageVolumes(t *testing.T) {
	s := startWith(t, testenv.Setup{}, derived(t, dataImage, nil, dataLayer(t)))
	pod, config := s.pod("volumes")
	id := strings.TrimSpace(s.crictl("inspecti", "-o", "go-template", "--template", "{{.status.id}}", dataImage))

	first := containerConfig("first", "sleep 1000")
	first.Mounts = []*criv1.Mount{
		imageMount(dataImage, "/whole", ""), imageMount(id, "/part", "data"), imageMount(dataImage, "/one", "data/file"),
		imageMount(dataImage, "/noexec", "data", "noexec", "nosuid", "nodev"),
	}
	a := s.container(pod, config, first)
	second := containerConfig("second", "sleep 1000")
	second.Mounts = []*criv1.Mount{imageMount(dataImage, "/v", "")}
	b := s.container(pod, config, second)

	for _, path := range []string{"/whole/data/file", "/part/file", "/one"} {
		if got := s.exec(a, "cat", path); got != "content" {
			t.Errorf("%s: %q", path, got)
		}
	}
	if got := s.exec(a, "/part/run"); got != "ran\n" {
		t.Errorf("program of an image: %q", got)
	}
	s.exec(a, "sh", "-c", "! /noexec/run")
	s.exec(a, "sh", "-c", "! touch /whole/new && ! touch /part/new && ! echo x > /one && ! mount -o remount,rw /whole")
	for word := range strings.FieldsSeq("ro noexec nosuid nodev") {
		contains(t, s.exec(a, "sh", "-c", "grep ' /noexec ' /proc/mounts"), word)
	}
	for _, m := range s.status(a).GetMounts() {
		if m.GetImage().GetImageRef() != id {
			t.Errorf("image of the volume at %s: %q, want %q", m.GetContainerPath(), m.GetImage().GetImageRef(), id)
		}
	}
	if got := s.mountsBelow("lib", "volumes"); got != 1 {
		t.Errorf("%d mounts of one image in one pod", got)
	}
	// A repeated request is the same one, though the answer knows more.
	third := containerConfig("third", "cat /v/data/file")
	third.Mounts = []*criv1.Mount{imageMount(dataImage, "/v", "")}
	c, err := s.create(pod, config, third)
	must(t, err)
	if again, err := s.create(pod, config, third); err != nil || again != c {
		t.Errorf("created again: %q, %v", again, err)
	}

	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	s.exec(b, "cat", "/v/data/file")
	must(t, s.start(c)) // made before the restart
	if code := s.waitExit(c).GetExitCode(); code != 0 {
		t.Errorf("container of before the restart: exit code %d", code)
	}
	if _, err := s.Images.RemoveImage(t.Context(), &criv1.RemoveImageRequest{Image: &criv1.ImageSpec{Image: dataImage}}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("removal of an image in use: %v", err)
	}
	for _, id := range []string{a, b, c} {
		if got := s.mountsBelow("lib", "volumes"); got != 1 {
			t.Errorf("%d mounts while containers are left", got)
		}
		s.remove(id)
	}
	if got := s.mountsBelow("lib", "volumes"); got != 0 {
		t.Errorf("%d mounts without a container", got)
	}
	s.crictl("rmi", dataImage)
	if left, _ := os.ReadDir(s.Path("lib", "volumes")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// What is wrong with an image volume is told, and leaves nothing.
func TestBadImageVolumes(t *testing.T) {
	s := startWith(t, testenv.Setup{}, derived(t, dataImage, nil, dataLayer(t)))
	pod, config := s.pod("bad")
	with := func(change func(*criv1.Mount)) *criv1.Mount {
		m := imageMount(dataImage, "/v", "")
		change(m)
		return m
	}
	for name, c := range map[string]struct {
		mount *criv1.Mount
		code  codes.Code
	}{
		"missing image":    {imageMount("registry.k8s.io/none:1", "/v", ""), codes.NotFound},
		"no image":         {imageMount("", "/v", ""), codes.InvalidArgument},
		"missing sub path": {imageMount(dataImage, "/v", "none"), codes.InvalidArgument},
		"sub path up":      {imageMount(dataImage, "/v", "../../etc"), codes.InvalidArgument},
		"absolute":         {imageMount(dataImage, "/v", "/etc"), codes.InvalidArgument},
		"link out":         {imageMount(dataImage, "/v", "data/out"), codes.InvalidArgument},
		"writable":         {with(func(m *criv1.Mount) { m.Readonly = false }), codes.InvalidArgument},
		"host path too":    {with(func(m *criv1.Mount) { m.HostPath = "/etc" }), codes.InvalidArgument},
		"without image":    {&criv1.Mount{ContainerPath: "/v", HostPath: "/etc", ImageSubPath: "x"}, codes.InvalidArgument},
		"option":           {imageMount(dataImage, "/v", "", "suid,dev"), codes.InvalidArgument},
	} {
		cfg := containerConfig("bad", "true")
		cfg.Mounts = []*criv1.Mount{imageMount(dataImage, "/good", ""), c.mount}
		if _, err := s.create(pod, config, cfg); status.Code(err) != c.code {
			t.Errorf("%s: %v, want %s", name, err, c.code)
		}
		if got := s.mountsBelow("lib", "volumes"); got != 0 {
			t.Errorf("%s: %d mounts left", name, got)
		}
	}
}

// A pod that is stopped holds no image, whatever its containers are.
func TestStoppedPodHoldsNoImageVolume(t *testing.T) {
	s := startWith(t, testenv.Setup{}, derived(t, dataImage, nil, dataLayer(t)))
	pod, config := s.pod("stopped")
	cfg := containerConfig("main", "sleep 1000")
	cfg.Mounts = []*criv1.Mount{imageMount(dataImage, "/v", "")}
	s.container(pod, config, cfg)
	_, err := s.CRI.StopPodSandbox(t.Context(), &criv1.StopPodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	if got := s.mountsBelow("lib", "volumes"); got != 0 {
		t.Errorf("%d mounts left", got)
	}
}

// A volume that an image declares begins with what the image has there, once per container.
func TestVolumesDeclaredByTheImage(t *testing.T) {
	declare := func(c *v1.Config) { c.Volumes = map[string]struct{}{"/data": {}, "/empty": {}} }
	s := startWith(t, testenv.Setup{}, derived(t, dataImage, declare, dataLayer(t)))
	pod, config := s.pod("declared")
	cfg := containerConfig("first", "cat /data/file; echo changed > /data/file; touch /empty/new; sleep 1000")
	cfg.Image.Image = dataImage
	first := s.container(pod, config, cfg)
	eventually(t, "file is changed", func() error {
		_, err := s.Crictl(t.Context(), "exec", "--sync", first, "test", "-e", "/empty/new")
		return err
	})
	if got := s.exec(first, "stat", "-c", "%a %u %g", "/data", "/data/file"); got != "750 12 12\n640 12 12\n" {
		t.Errorf("modes and owners: %q", got)
	}
	contains(t, s.exec(first, "cat", "/proc/mounts"), " /data ", " /empty ")
	second := containerConfig("second", "sleep 1000")
	second.Image.Image = dataImage
	other := s.container(pod, config, second)
	if got := s.exec(other, "cat", "/data/file"); got != "content" {
		t.Errorf("another container's volume: %q", got)
	}
	folder := filepath.Join(s.Path("lib", "containers"), first)
	if _, err := os.Stat(folder); err != nil {
		t.Error(err)
	}
	s.remove(first)
	if _, err := os.Stat(folder); err == nil {
		t.Error("the volumes of a removed container are there")
	}
}

// A runtime handler may have another snapshotter; what was pulled for the default one is
// unpacked when it is needed, for root file systems and volumes.
func TestHandlerWithAnotherSnapshotter(t *testing.T) {
	setup := testenv.Setup{Configure: func(p testenv.Process, settings testenv.Settings) {
		if p != testenv.Sandboxd {
			return
		}
		for _, key := range []string{"runtime_type", "shim_path", "binary_name", "runtime_root", "sandboxer"} {
			settings.Set("runtime.handlers.copy."+key, settings.Get("runtime.handlers."+settings.Get("runtime.default_handler").(string)+"."+key))
		}
		settings.Set("runtime.handlers.copy.snapshotter", "native")
	}}
	s := startWith(t, setup, derived(t, dataImage, nil, dataLayer(t)))
	config := s.podConfig("copy")
	answer, err := s.CRI.RunPodSandbox(t.Context(), &criv1.RunPodSandboxRequest{Config: config, RuntimeHandler: "copy"})
	must(t, err)
	cfg := containerConfig("main", "sleep 1000")
	cfg.Mounts = []*criv1.Mount{imageMount(dataImage, "/v", "data")}
	id := s.container(answer.GetPodSandboxId(), config, cfg)
	if got := s.exec(id, "cat", "/v/file"); got != "content" {
		t.Errorf("content: %q", got)
	}
	if got := s.exec(id, "sh", "-c", "touch /new && grep ' / ' /proc/mounts"); strings.Contains(got, "overlay") {
		t.Errorf("root file system: %q", got)
	}
	stats, err := s.CRI.ContainerStats(t.Context(), &criv1.ContainerStatsRequest{ContainerId: id})
	must(t, err)
	if layer := stats.GetStats().GetWritableLayer(); layer.GetUsedBytes().GetValue() == 0 || filepath.Base(layer.GetFsId().GetMountpoint()) != "native" {
		t.Errorf("writable layer: %v", layer)
	}
	s.remove(id)
}
