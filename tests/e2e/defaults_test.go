//go:build integration

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// What an operator gives all containers comes by a file beside the main one, at once, and gives
// way to what a pod asks for.
func TestDefaultsOfAllContainers(t *testing.T) {
	s := start(t, testenv.Setup{})
	s.pull(busybox)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("of the node"), 0o644))
	folder := s.ConfigFile(testenv.Sandboxd) + ".d"
	must(t, os.Mkdir(folder, 0o755))
	must(t, os.WriteFile(filepath.Join(folder, "50-defaults.toml"), []byte(fmt.Sprintf(`
[runtime]
default_env = ["PROXY=node", "GIVEN=node"]
default_mounts = ["%[1]s:/node-data", "%[1]s/file:/node-file"]
timezone = "Asia/Tokyo"
absent_mount_sources_to_reject = ["%[1]s/no-such-file"]
[runtime.handlers.crisp]
exec_cpu_affinity = "first"
`, dir)), 0o644))
	s.hangup(testenv.Sandboxd, "configuration read anew")
	pod, podConfig := s.pod("defaults")

	config := containerConfig("main", "sleep 1000")
	config.Envs = []*criv1.KeyValue{{Key: "GIVEN", Value: []byte("own")}}
	config.Mounts = []*criv1.Mount{{HostPath: t.TempDir(), ContainerPath: "/node-file"}, {HostPath: filepath.Join(dir, "made"), ContainerPath: "/made"}}
	if runtime.NumCPU() > 1 {
		config.Linux.Resources = &criv1.LinuxContainerResources{CpusetCpus: "0-1"}
	}
	id := s.container(pod, podConfig, config)
	for command, want := range map[string]string{
		"echo $PROXY $GIVEN":                                "node own",
		"cat /node-data/file":                               "of the node",
		"touch /node-data/file 2>/dev/null || echo refused": "refused",
		"test -d /node-file && ls /node-file | wc -l":       "0",
		"test -d /made && echo made":                        "made",
		"unset TZ; date +%Z":                                "JST",
	} {
		if got := strings.TrimSpace(s.exec(id, "sh", "-c", command)); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
	if runtime.NumCPU() > 1 {
		allowed := func(of string) string {
			return s.exec(id, "sed", "-n", "s/^Cpus_allowed_list:[[:space:]]*//p", "/proc/"+of+"/status")
		}
		if own, first := strings.TrimSpace(allowed("self")), strings.TrimSpace(allowed("1")); own != "0" || first != "0-1" {
			t.Errorf("a command runs on the processors %s, the container on %s", own, first)
		}
	}

	config = containerConfig("absent", "true")
	config.Mounts = []*criv1.Mount{{HostPath: filepath.Join(dir, "no-such-file"), ContainerPath: "/x"}}
	if _, err := s.create(pod, podConfig, config); status.Code(err) != codes.NotFound {
		t.Errorf("a source that must not be made: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "no-such-file")); !os.IsNotExist(err) {
		t.Errorf("the source: %v", err)
	}
	must(t, os.RemoveAll(filepath.Join(dir, "file")))
	if _, err := s.create(pod, podConfig, containerConfig("without", "true")); status.Code(err) != codes.FailedPrecondition || !strings.Contains(fmt.Sprint(err), "/node-file") {
		t.Errorf("a mount of all containers without a source: %v", err)
	}

	must(t, os.WriteFile(filepath.Join(folder, "60-wrong.toml"), []byte("[runtime]\ndefault_env = ['nothing']\n"), 0o644))
	s.hangup(testenv.Sandboxd, "the old one stays in force")
}
