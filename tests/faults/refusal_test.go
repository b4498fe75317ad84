//go:build integration

package faults

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// What a request asks for and the kernel or the OCI runtime cannot do is told with its field, as
// the caller's mistake and not as a failure of the runtime, whatever shim there is.
func TestRefusedValuesAreNamed(t *testing.T) {
	s := start(t, testenv.Setup{})
	dir := t.TempDir()
	file, profile := filepath.Join(dir, "file"), filepath.Join(dir, "arch.json")
	must(t, os.WriteFile(file, nil, 0o644))
	must(t, os.WriteFile(profile, []byte(`{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_FOO"]}`), 0o644))
	resources := func(r *criv1.LinuxContainerResources) func(*criv1.ContainerConfig) {
		return func(c *criv1.ContainerConfig) { c.Linux.Resources = r }
	}
	mount := func(host, path string) func(*criv1.ContainerConfig) {
		return func(c *criv1.ContainerConfig) { c.Mounts = []*criv1.Mount{{HostPath: host, ContainerPath: path}} }
	}
	podConfig := s.podConfig("refused")
	pods := map[string]string{"crisp": s.pod(podConfig, ""), "runc": s.pod(s.podConfig("refused-runc"), "runc")}
	for _, tt := range []struct {
		name, field string
		change      func(*criv1.ContainerConfig)
	}{
		{"processor", "resources.cpuset_cpus", resources(&criv1.LinuxContainerResources{CpusetCpus: "4000"})},
		{"memory-node", "resources.cpuset_mems", resources(&criv1.LinuxContainerResources{CpusetMems: "777"})},
		{"memory", "resources.memory_limit_in_bytes", resources(&criv1.LinuxContainerResources{MemoryLimitInBytes: 1000})},
		{"quota", "resources.cpu_quota", resources(&criv1.LinuxContainerResources{CpuQuota: 1})},
		{"file-on-folder", `container_path "/etc"`, mount(file, "/etc")},
		{"folder-on-file", `container_path "/etc/passwd"`, mount(dir, "/etc/passwd")},
		{"inside-proc", `container_path "/proc/self/attr"`, mount(dir, "/proc/self/attr")},
		{"over-proc", `container_path "/proc"`, mount(dir, "/proc")},
		{"working-folder", "config.working_dir", func(c *criv1.ContainerConfig) { c.WorkingDir = "/etc/passwd" }},
		{"no-command", "config.command", func(c *criv1.ContainerConfig) { c.Command = []string{"/nothing"} }},
		{"folder-as-command", "config.command", func(c *criv1.ContainerConfig) { c.Command = []string{"/etc"} }},
		{"seccomp", "security_context.seccomp", func(c *criv1.ContainerConfig) {
			c.Linux.SecurityContext = &criv1.LinuxContainerSecurityContext{
				Seccomp: &criv1.SecurityProfile{ProfileType: criv1.SecurityProfile_Localhost, LocalhostRef: profile},
			}
		}},
	} {
		for handler, pod := range pods {
			config := script(tt.name, "exec sleep 1000")
			tt.change(config)
			id, err := s.create(pod, podConfig, config)
			if err == nil {
				err = s.startContainer(id)
			}
			code := status.Code(err)
			if (code != codes.FailedPrecondition && code != codes.InvalidArgument) || !strings.Contains(fmt.Sprint(err), tt.field) {
				t.Errorf("%s, handler %s: %v, want a refusal that names %s", tt.name, handler, err, tt.field)
			}
		}
	}
}

// An OCI runtime that does not come to an end, or says more than anybody reads, is ended in
// time; nothing of it stays and the pod goes on.
func TestOCIRuntimeThatHangs(t *testing.T) {
	runc, err := exec.LookPath("runc")
	must(t, err)
	dir := t.TempDir()
	wrapper := func(name, create string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(fmt.Sprintf("#!/bin/sh\nfor word; do [ \"$word\" = create ] && { %s; }; done\nexec %s \"$@\"\n", create, runc)), 0o755))
		return path
	}
	marker := filepath.Join(dir, "marker")
	s := start(t, testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) {
		settings.Set("runtime.shim.create_timeout", "3s")
		handler(settings, "hangs", map[string]any{"binary_name": wrapper("hangs", "exec tail -f /dev/null "+marker)})
		handler(settings, "floods", map[string]any{"binary_name": wrapper("floods", "exec yes "+marker+" >&2")})
	})})
	for _, name := range []string{"hangs", "floods"} {
		podConfig := s.podConfig(name)
		pod := s.pod(podConfig, name)
		id, err := s.create(pod, podConfig, script("main", "exec sleep 1000"))
		must(t, err)
		err = s.startContainer(id)
		if status.Code(err) != codes.DeadlineExceeded || !strings.Contains(fmt.Sprint(err), "create_timeout") {
			t.Errorf("%s: %v", name, err)
		}
		if st := s.status(id); st.GetState() != criv1.ContainerState_CONTAINER_EXITED || st.GetReason() != "StartError" {
			t.Errorf("%s: the container is %s, %s", name, st.GetState(), st.GetReason())
		}
		must(t, s.removePod(pod))
	}
	eventually(t, patience, "end of the runtimes", func() error {
		out, _ := exec.Command("pgrep", "-f", marker).Output()
		if len(out) > 0 {
			return fmt.Errorf("processes %q", out)
		}
		return nil
	})
}
