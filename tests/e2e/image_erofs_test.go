//go:build integration

package e2e

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const oddImage = "crisp.local/odd:1"

// oddLayers hides, replaces and links files in each way that a layer can.
func oddLayers(t *testing.T) fixture.Image {
	t.Helper()
	return derived(t, oddImage, nil,
		layerOf(t,
			entry{name: "d/", kind: tar.TypeDir, mode: 0o2750, uid: 7}, entry{name: "d/gone", body: "x"}, entry{name: "d/stays", body: "x"},
			entry{name: "o/", kind: tar.TypeDir, mode: 0o755}, entry{name: "o/old", body: "x"},
			entry{name: "suid", body: "x", mode: 0o4755}, entry{name: "one", body: "linked"}, entry{name: "two", kind: tar.TypeLink, link: "one"}),
		layerOf(t,
			entry{name: "d/.wh.gone"}, entry{name: "o/.wh..wh..opq"}, entry{name: "o/new", body: "x"}, entry{name: "three", kind: tar.TypeLink, link: "one"}))
}

// erofsSetup unpacks images with the snapshotter erofs.
func erofsSetup(t *testing.T, handler string) testenv.Setup {
	t.Helper()
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		if os.Getenv("CRISP_TEST_ALL") == "1" {
			t.Fatal(err)
		}
		t.Skip("mkfs.erofs is missing, install erofs-utils")
	}
	return testenv.Setup{Handler: handler, Configure: func(p testenv.Process, settings testenv.Settings) {
		if p == testenv.Sandboxd {
			settings.Set("image.snapshotter", "erofs")
		}
	}}
}

// layerMounts lists where layers are mounted.
func (s *system) layerMounts() []string {
	s.t.Helper()
	all, err := mountinfo.GetMounts(mountinfo.PrefixFilter(s.Path("lib", "images", "erofs")))
	must(s.t, err)
	var out []string
	for _, m := range all {
		out = append(out, m.Mountpoint)
	}
	slices.Sort(out)
	return out
}

// checkState runs `sandboxd check-state`.
func (s *system) checkState() {
	s.t.Helper()
	program, err := testenv.Binary(string(testenv.Sandboxd))
	must(s.t, err)
	out, err := exec.CommandContext(s.t.Context(), program, "check-state", "--config", s.ConfigFile(testenv.Sandboxd), "--wait", "30s").CombinedOutput()
	if err != nil {
		s.t.Errorf("check-state: %v:\n%s", err, out)
	}
}

// Images as erofs file systems: what containers see, over deaths of sandboxd and as after a reboot,
// and that nothing stays mounted.
func TestErofs(t *testing.T) {
	testenv.EachHandler(t, tellErofs)
}

func tellErofs(t *testing.T, handler string) {
	s := startWith(t, erofsSetup(t, handler), oddLayers(t), derived(t, dataImage, nil, dataLayer(t)))
	pod, config := s.pod("erofs")
	cfg := containerConfig("main", "sleep 1000")
	cfg.Image = &criv1.ImageSpec{Image: oddImage}
	cfg.Mounts = []*criv1.Mount{imageMount(dataImage, "/v", "data")}
	id := s.container(pod, config, cfg)
	const look = "cd /; ls d o; stat -c '%a %u' d; stat -c %a suid; cat one two three /v/file; echo; grep ' / ' /proc/mounts"
	see := func(id string) {
		t.Helper()
		got := s.exec(id, "sh", "-c", look)
		for _, want := range []string{"d:\nstays\n\no:\nnew\n2750 7\n4755\nlinkedlinkedlinkedcontent\n", "overlay"} {
			if !strings.Contains(got, want) {
				t.Errorf("seen: %q, want %q in it", got, want)
			}
		}
	}
	see(id)
	s.exec(id, "sh", "-c", "rm /d/stays && touch /d/stays && dd if=/dev/zero of=/written bs=1M count=2")
	layers := s.layerMounts()
	if len(layers) < 4 {
		t.Errorf("mounted layers: %v", layers)
	}
	eventually(t, "what is written is counted", func() error {
		stats, err := s.CRI.ContainerStats(t.Context(), &criv1.ContainerStatsRequest{ContainerId: id})
		layer := stats.GetStats().GetWritableLayer()
		if err == nil && (layer.GetUsedBytes().GetValue() < 2<<20 || filepath.Base(layer.GetFsId().GetMountpoint()) != "erofs") {
			err = fmt.Errorf("writable layer: %v", layer)
		}
		return err
	})

	// A second container has the same mounts; sandboxd dies between its creation and its start, and
	// what is mounted goes, as with a reboot.
	next := containerConfig("next", "sleep 1000")
	next.Image, next.Mounts = cfg.GetImage(), cfg.GetMounts()
	second, err := s.create(pod, config, next)
	must(t, err)
	if got := s.layerMounts(); !slices.Equal(got, layers) {
		t.Errorf("mounted for two containers: %v, for one: %v", got, layers)
	}
	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	for _, m := range layers {
		out, err := exec.CommandContext(t.Context(), "umount", "--lazy", m).CombinedOutput()
		if err != nil {
			t.Fatalf("umount: %v: %s", err, out)
		}
	}
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	must(t, s.start(second))
	see(second)
	s.exec(id, "test", "-s", "/written")
	s.checkState()

	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	see(second)
	s.remove(id)
	s.remove(second)
	_, err = s.CRI.RemovePodSandbox(t.Context(), &criv1.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	s.checkState()
	eventually(t, "no layer is mounted", func() error {
		if left := s.layerMounts(); len(left) > 0 {
			return fmt.Errorf("mounted: %v", left)
		}
		return nil
	})
	for _, image := range []string{oddImage, dataImage, busybox} {
		_, err := s.Images.RemoveImage(t.Context(), &criv1.RemoveImageRequest{Image: &criv1.ImageSpec{Image: image}})
		must(t, err)
	}
	eventually(t, "no layer is left", func() error {
		left, err := os.ReadDir(s.Path("lib", "images", "erofs", "snapshots"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left: %v", left)
		}
		return err
	})
}

// A pod with a user namespace sees layers with its ids.
func TestErofsInUserNamespace(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := startWith(t, erofsSetup(t, handler), oddLayers(t))
		pod, config, err := s.mappedPod("mapped", nil)
		must(t, err)
		cfg := mappedContainer(config, "main", "sleep 1000")
		cfg.Image = &criv1.ImageSpec{Image: oddImage}
		id := s.container(pod, config, cfg)
		if got := s.exec(id, "sh", "-c", "stat -c '%u' /d /one && echo x > /d/mine && stat -c %u /d/mine && cat /three"); got != "7\n0\n0\nlinked" {
			t.Errorf("seen: %q", got)
		}
		s.remove(id)
	})
}
