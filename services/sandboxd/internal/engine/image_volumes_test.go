package engine_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func volumeConfig(name string, m *criv1.Mount) *criv1.ContainerConfig {
	cfg := containerConfig(name)
	cfg.Mounts = []*criv1.Mount{{ContainerPath: "/host", HostPath: "/srv"}, m}
	return cfg
}

func held(w *world, kind string) (n int) {
	for _, h := range w.held() {
		if strings.HasPrefix(h, kind+" ") {
			n++
		}
	}
	return n
}

func TestImageVolumes(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	pod := runPod(t, n, "p")
	cfg := volumeConfig("c", &criv1.Mount{ContainerPath: "/v", Readonly: true, Image: &criv1.ImageSpec{Image: "data"}, ImageSubPath: "x"})
	id, _, err := n.Containers.Prepare(t.Context(), "gw", pod, cfg, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Containers.Commit(t.Context(), id, nil); err != nil {
		t.Fatal(err)
	}
	rec, err := n.Views.Container(id)
	if err != nil || rec.GetConfig().GetMounts()[1].GetImage().GetImageRef() != "sha256:1" {
		t.Errorf("recorded mounts: %v %v", rec.GetConfig().GetMounts(), err)
	}
	if cfg.GetMounts()[1].GetImage().GetImageRef() != "" {
		t.Error("the request was changed")
	}
	if again, existing, err := n.Containers.Prepare(t.Context(), "gw", pod, cfg, ""); err != nil || !existing || again != id {
		t.Errorf("same request: %q %t %v", again, existing, err)
	}
	if users := n.Views.ImageUsers(t.Context(), "sha256:1"); !slices.Equal(users, []string{id}) {
		t.Errorf("users of the image: %v", users)
	}

	// A restart keeps what a record names and releases the rest.
	n.close()
	w.do("test", func() { w.holds["volumes "+pod+" lost"], w.holds["volumes gone c9"] = true, true })
	n = start(t, w, "boot")
	if got := held(w, "volumes"); got != 1 {
		t.Errorf("%d volumes held after a restart: %v", got, w.held())
	}
	if _, err := n.Containers.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if got := held(w, "volumes"); got != 0 {
		t.Errorf("held by a removed container: %v", w.held())
	}
}

func TestStoppedSandboxReleasesImageVolumes(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	pod := runPod(t, n, "p")
	m := &criv1.Mount{ContainerPath: "/v", Readonly: true, Image: &criv1.ImageSpec{Image: "data"}}
	id, _, err := n.Containers.Prepare(t.Context(), "gw", pod, volumeConfig("c", m), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Containers.Commit(t.Context(), id, nil); err != nil {
		t.Fatal(err)
	}
	w.set("volumes.release", errInjected)
	if err := n.Sandboxes.Stop(t.Context(), pod); err == nil {
		t.Error("stopped although a volume is held")
	}
	w.set("volumes.release", nil)
	if err := n.Sandboxes.Stop(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	if got := held(w, "volumes"); got != 0 {
		t.Errorf("held by a stopped sandbox: %v", w.held())
	}
}

func TestBadImageVolumesLeaveNothing(t *testing.T) {
	w := newWorld(t)
	n := start(t, w, "boot")
	n.session(t, "gw")
	pod := runPod(t, n, "p")
	image := func(name string) *criv1.ImageSpec { return &criv1.ImageSpec{Image: name} }
	for name, c := range map[string]struct {
		mount *criv1.Mount
		is    func(error) bool
	}{
		"absent":        {&criv1.Mount{Readonly: true, Image: image("absent")}, errdefs.IsNotFound},
		"empty":         {&criv1.Mount{Readonly: true, Image: image("")}, errdefs.IsInvalidArgument},
		"writable":      {&criv1.Mount{Image: image("data")}, errdefs.IsInvalidArgument},
		"host path too": {&criv1.Mount{Readonly: true, Image: image("data"), HostPath: "/srv"}, errdefs.IsInvalidArgument},
		"only sub path": {&criv1.Mount{HostPath: "/srv", ImageSubPath: "x"}, errdefs.IsInvalidArgument},
	} {
		c.mount.ContainerPath = "/v"
		before := len(w.held())
		if _, _, err := n.Containers.Prepare(t.Context(), "gw", pod, volumeConfig("c", c.mount), ""); !c.is(err) {
			t.Errorf("%s: %v", name, err)
		}
		if after := w.held(); len(after) != before {
			t.Errorf("%s: left %v", name, after)
		}
	}
	w.set("volumes.mount", errInjected)
	_, _, err := n.Containers.Prepare(t.Context(), "gw", pod, volumeConfig("c", &criv1.Mount{ContainerPath: "/v", Readonly: true, Image: image("data")}), "")
	if err == nil || !strings.Contains(err.Error(), "ImageVolumeMountFailed") {
		t.Errorf("failed mount: %v", err)
	}
	if got := held(w, "volumes") + held(w, "rootfs"); got != 0 {
		t.Errorf("left: %v", w.held())
	}
}
