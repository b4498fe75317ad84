//go:build integration

package ocispec

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/namespaces"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/host"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// runtime returns the OCI runtime to test with.
func runtime(t *testing.T) string {
	t.Helper()
	testkit.NeedRoot(t)
	for _, name := range []string{os.Getenv("CRISP_TEST_RUNC"), "runc"} {
		if path, err := exec.LookPath(name); name != "" && err == nil {
			return path
		}
	}
	testkit.Lacks(t, "runc in CRISP_TEST_RUNC or PATH")
	return ""
}

// run runs a script in a container whose root is a writable layer on the host's, and returns
// what it printed.
func run(t *testing.T, change func(*Input)) string {
	t.Helper()
	runc := runtime(t)
	dir := t.TempDir()
	// Root of a user namespace is nobody out here and must get through.
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	for _, d := range []string{"upper", "work", "bundle/rootfs", "state"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"hosts", "hostname", "resolv.conf"} {
		if err := os.WriteFile(filepath.Join(dir, f), []byte("made "+f+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	root := filepath.Join(dir, "bundle/rootfs")
	layers := "lowerdir=/,upperdir=" + dir + "/upper,workdir=" + dir + "/work"
	if err := unix.Mount("overlay", root, "overlay", 0, layers); err != nil {
		testkit.Lacks(t, "overlay: "+err.Error())
	}
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	facts, err := host.Probe()
	if err != nil {
		t.Fatal(err)
	}
	in := input()
	in.ID = "crisp-test-" + filepath.Base(filepath.Dir(dir))
	in.CgroupsPath = resource.CgroupsPath("", in.ID, false)
	in.Files = pod.SandboxFiles{
		Hosts: dir + "/hosts", Hostname: dir + "/hostname", ResolvConf: dir + "/resolv.conf", Shm: "/dev/shm",
	}
	in.Config.Linux.Resources = &criv1.LinuxContainerResources{OomScoreAdj: -998, MemoryLimitInBytes: 64 << 20, CpuShares: 100}
	change(&in)
	pins := namespaces.New(dir+"/ns", namespaces.Defaults{UnprivilegedPorts: true})
	user := in.SandboxConfig.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
	in.Namespaces, err = pins.Pin(t.Context(), in.ID, namespaces.Request{
		Network: true, IPC: true, UTS: true, Hostname: "web-0", UIDs: user.GetUids(), GIDs: user.GetGids(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pins.Unpin(t.Context(), in.ID) })
	spec, _ := build(t, facts, Options{}, in)
	raw, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/bundle/config.json", raw, 0o644); err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), runc, "--root", dir+"/state", "run", "--bundle", dir+"/bundle", in.ID)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s%s", err, stdout.String(), stderr.String())
	}
	return stdout.String()
}

func expect(t *testing.T, got string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("lacks %q:\n%s", w, got)
		}
	}
}

const look = `hostname; id; cat /etc/hosts /etc/resolv.conf; grep -E "^(Seccomp|NoNewPrivs|CapEff):" /proc/self/status
	cat /proc/self/oom_score_adj; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; echo pid $$; ls /sys/class/net; cat /proc/self/uid_map`

func TestRuncRunsTheSmallContainer(t *testing.T) {
	got := run(t, func(in *Input) {
		in.Config.Command = []string{"/bin/sh", "-c", look + `; touch /sys/x 2>&1; cat /proc/kcore 2>&1 | wc -c; touch /rw && echo writable`}
		in.sc().Seccomp = &criv1.SecurityProfile{}
		in.sc().NoNewPrivs = true
		in.sc().RunAsUser = &criv1.Int64Value{Value: 0}
		in.sc().SupplementalGroups = []int64{1234}
		in.sc().MaskedPaths = []string{"/proc/kcore"}
	})
	expect(t, got, "web-0\n", "uid=0(root) gid=0(root) groups=0(root),1234", "made hosts", "made resolv.conf", "Seccomp:\t2",
		"NoNewPrivs:\t1", "pid 1\n", "lo\n", "Read-only file system", "writable")
}

func TestRuncRunsThePrivilegedContainer(t *testing.T) {
	got := run(t, func(in *Input) {
		*in = privileged(*in)
		in.Config.Command = []string{"/bin/sh", "-c", look + `; ls /dev/null /dev/kmsg; mount -t tmpfs x /mnt && echo mounted`}
	})
	expect(t, got, "Seccomp:\t0", "mounted", "pid 1\n")
}

func TestRuncRunsInAUserNamespace(t *testing.T) {
	got := run(t, func(in *Input) {
		*in = userns(*in)
		in.Config.Command = []string{"/bin/sh", "-c", look}
	})
	expect(t, got, "web-0\n", "65536", "pid 1\n", "made hosts")
}
