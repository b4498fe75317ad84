package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/containerd/errdefs"
)

// What runc 1.5 and crun 1.8 say, and the field that it is about; none is a failure of their own.
func TestExplained(t *testing.T) {
	t.Parallel()
	const init = "runtime create: runc create failed: unable to start container process: error during container init: "
	for said, field := range map[string]string{
		`runc create failed: unable to apply cgroup configuration: failed to write "4000": write /sys/fs/cgroup/cpuset/a/b/cpuset.cpus: numerical result out of range`:                            "resources.cpuset_cpus",
		init + `error setting cgroup config for procHooks process: failed to write "1": write /sys/fs/cgroup/cpu/x/cpu.cfs_quota_us: invalid argument`:                                            "resources.cpu_quota",
		init + `failed to write "x": write /sys/fs/cgroup/x/hugetlb.2MB.max: invalid argument`:                                                                                                    "resources.hugepage_limits",
		"OCI runtime create failed: writing file `/sys/fs/cgroup/x/memory.high`: Invalid argument: unknown":                                                                                       `resources.unified["memory.high"]`,
		init + "error setting cgroup config for procHooks process: unable to set memory limit to 1000 (current usage: 3293184, peak usage: 3371008)":                                              "resources.memory_limit_in_bytes",
		init + `error mounting "/tmp/file" to rootfs at "/etc": mount src=/tmp/file, dst=/etc, flags=MS_BIND|MS_REC: not a directory`:                                                             `config.mounts with container_path "/etc"`,
		"OCI runtime create failed: mount `/tmp/file` to `etc`: Not a directory":                                                                                                                  `config.mounts with container_path "etc"`,
		"runtime create: runc create failed: string SCMP_ACT_FOO is not a valid action for seccomp":                                                                                               "security_context.seccomp",
		init + `exec: "/nothing": stat /nothing: no such file or directory`:                                                                                                                       "config.command",
		"OCI runtime create failed: executable file `/nothing` not found in $PATH: No such file or directory":                                                                                     "config.command",
		init + "mkdir /etc/passwd: not a directory":                                                                                                                                               "config.working_dir",
		"runtime create: runc create failed: invalid mount &{Source:/a Destination:/data Device:bind Flags:20480 ClearedFlags:0}: id-mapped mounts must have both uid and gid mappings specified": `config.mounts with container_path "/data"`,
		init + `can't mask path "/proc/self/fd/3": mount dst=/proc/self/fd/3, dstFd=/proc/thread-self/fd/13, flags=MS_BIND: no such file or directory`:                                            "security_context.masked_paths",
		init + `can't make "/proc/self/fd/3" read-only: mount dst=/proc/self/fd/3, flags=MS_BIND|MS_REC: invalid argument`:                                                                        "security_context.readonly_paths",
		"runtime create: signal: killed":                             "",
		"runtime create: runc create failed: cannot allocate memory": "",
	} {
		err := explained(fmt.Errorf("create task %q: shim Create: %s: %w", "c", said, errdefs.ErrInternal), "")
		switch {
		case !strings.Contains(err.Error(), said):
			t.Errorf("%q is missing in %q", said, err)
		case field == "" && !errdefs.IsInternal(err):
			t.Errorf("%q: %v", said, err)
		case field != "" && (!errdefs.IsFailedPrecondition(err) || errdefs.IsInternal(err) || !strings.Contains(err.Error(), field)):
			t.Errorf("%q: %v, want the field %s", said, err, field)
		}
	}
	other := fmt.Errorf("write /sys/fs/cgroup/x/cpu.max: %w", errdefs.ErrUnavailable)
	if got := explained(other, ""); !errors.Is(got, other) {
		t.Errorf("%v", got)
	}
	exec := fmt.Errorf("shim Start: exec: \"/nothing\": stat /nothing: no such file or directory: %w", errdefs.ErrInternal)
	if got := explained(exec, "x"); !errdefs.IsFailedPrecondition(got) || !strings.HasPrefix(got.Error(), "cmd: ") {
		t.Errorf("command of an exec: %v", got)
	}
}

// An OCI runtime that says a lot is heard to its end, and told with the middle left out.
func TestLongWordsAreShortened(t *testing.T) {
	t.Parallel()
	for first, kind := range map[string]error{"reason unknown": errdefs.ErrInternal, `exec: "/nothing": not there`: errdefs.ErrFailedPrecondition} {
		said := first + strings.Repeat("\xc3\xa4", 50_000) + "the last words"
		err := explained(fmt.Errorf("runtime create: %s: %w", said, errdefs.ErrInternal), "")
		if !errors.Is(err, kind) || len(err.Error()) > mostSaid+200 || !strings.Contains(err.Error(), first) || !strings.Contains(err.Error(), "the last words") {
			t.Errorf("%d bytes, %.60q", len(err.Error()), err)
		}
		if !utf8.ValidString(err.Error()) {
			t.Error("the text was cut within a character")
		}
	}
}
