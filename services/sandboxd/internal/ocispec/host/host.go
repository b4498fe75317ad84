// Package host knows what the kernel and the daemon's own rights allow containers, and fits
// limits to it. All of it may be called concurrently.
package host

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/cgroups/v3"
	capability "github.com/containerd/containerd/v2/pkg/cap"
	"github.com/containerd/containerd/v2/pkg/seccomp"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/userns"
)

// Facts is what the kernel and the daemon's own rights allow. It does not change while the
// daemon runs.
type Facts struct {
	// Hostname is the node's host name.
	Hostname string
	// Own is the user namespace that the daemon runs in.
	Own userns.Namespace
	// ForeignNetwork, ForeignIPC and ForeignPID say that these namespaces of the node belong to
	// another user namespace than the daemon's: what is theirs cannot be mounted then.
	ForeignNetwork, ForeignIPC, ForeignPID bool
	// Groups is where containers can have control groups.
	Groups Delegation
	// CgroupV2 is true if all controllers are in the unified hierarchy.
	CgroupV2 bool
	// Hugetlb is true if the hugetlb controller is there, Swap if swap can be limited.
	Hugetlb, Swap bool
	// Seccomp, AppArmor, SELinux and RDT say whether these can be used.
	Seccomp, AppArmor, SELinux, RDT bool
	// Capabilities are the names in the daemon's own bounding set: nothing else can be
	// given to a container.
	Capabilities []string
	// OOMScoreAdj is the daemon's own value, MayLowerOOMScore whether it may go below it.
	OOMScoreAdj      int
	MayLowerOOMScore bool
	// RecursiveReadOnly is true if the kernel can make a whole mount tree read-only.
	RecursiveReadOnly bool
	// HardLimits are the daemon's own hard limits by type; MayRaiseLimits is true if
	// containers can get higher ones.
	HardLimits     map[string]uint64
	MayRaiseLimits bool
}

// Probe finds the facts of the host.
func Probe() (Facts, error) {
	h := Facts{
		CgroupV2:          cgroups.Mode() == cgroups.Unified,
		Seccomp:           seccomp.IsEnabled(),
		AppArmor:          readsAs("/sys/module/apparmor/parameters/enabled", "Y"),
		SELinux:           selinux.GetEnabled(),
		RDT:               exists("/sys/fs/resctrl/schemata"),
		RecursiveReadOnly: mountSetattrWorks(),
		HardLimits:        hardLimits(),
	}
	var err error
	if h.Own, err = userns.Own(); err != nil {
		return Facts{}, err
	}
	if h.Hostname, err = os.Hostname(); err != nil {
		return Facts{}, fmt.Errorf("host name: %w", err)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return Facts{}, fmt.Errorf("own capabilities: %w", err)
	}
	sets, err := capability.ParseProcPIDStatus(bytes.NewReader(status))
	if err != nil {
		return Facts{}, fmt.Errorf("own capabilities: %w", err)
	}
	h.Capabilities, _ = capability.FromBitmap(sets[capability.Bounding])
	const sysResource = 1 << unix.CAP_SYS_RESOURCE
	// The kernel asks for the right over the machine; that over a user namespace is not enough.
	h.MayLowerOOMScore = sets[capability.Effective]&sysResource != 0 && !h.Own.Nested()
	h.MayRaiseLimits = h.MayLowerOOMScore
	score, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return Facts{}, fmt.Errorf("own oom score: %w", err)
	}
	if h.OOMScoreAdj, err = strconv.Atoi(strings.TrimSpace(string(score))); err != nil {
		return Facts{}, fmt.Errorf("own oom score: %w", err)
	}
	h.Hugetlb, h.Swap = controllers(h.CgroupV2)
	if h.Own.Nested() {
		return h.nested()
	}
	return h, nil
}

// nested finds what is different for a daemon in a user namespace: what belongs to the machine
// is there to be seen, and not to be used.
func (h Facts) nested() (Facts, error) {
	// Profiles are the machine's, and who cannot load one cannot tell which are loaded either.
	h.AppArmor, h.RDT = false, false
	var err error
	if h.ForeignNetwork, err = foreign("/proc/self/ns/net"); err != nil {
		return Facts{}, err
	}
	if h.ForeignIPC, err = foreign("/proc/self/ns/ipc"); err != nil {
		return Facts{}, err
	}
	if h.ForeignPID, err = foreign("/proc/self/ns/pid"); err != nil {
		return Facts{}, err
	}
	h.Groups, err = delegated(h.CgroupV2)
	return h, err
}

// foreign says whether a namespace of this process belongs to another user namespace than its own.
func foreign(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	owner, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_USERNS)
	if errors.Is(err, unix.EPERM) {
		return true, nil // one above, which is not shown
	}
	if err != nil {
		return false, fmt.Errorf("owner of %s: %w", path, err)
	}
	defer unix.Close(owner)
	var of, own unix.Stat_t
	if err := unix.Fstat(owner, &of); err != nil {
		return false, err
	}
	if err := unix.Stat("/proc/self/ns/user", &own); err != nil {
		return false, err
	}
	return of.Ino != own.Ino || of.Dev != own.Dev, nil
}

// controllers says whether huge pages and swap can be limited.
func controllers(unified bool) (hugetlb, swap bool) {
	const root = "/sys/fs/cgroup"
	if !unified {
		return exists(root + "/hugetlb"), exists(root + "/memory/memory.memsw.limit_in_bytes")
	}
	available, err := os.ReadFile(root + "/cgroup.controllers")
	if err != nil {
		return false, false
	}
	hugetlb = bytes.Contains(available, []byte("hugetlb"))
	// The root group has no swap file; any group that limits memory shows whether swap is on.
	groups, err := filepath.Glob(root + "/*/memory.swap.max")
	if own := ownUnifiedGroup(); own != "" {
		swap = exists(filepath.Join(root, own, "memory.swap.max"))
	}
	return hugetlb, swap || (err == nil && len(groups) > 0)
}

func ownUnifiedGroup() string {
	raw, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	s := bufio.NewScanner(bytes.NewReader(raw))
	for s.Scan() {
		if path, ok := strings.CutPrefix(s.Text(), "0::"); ok {
			return path
		}
	}
	return ""
}

// rlimitNumbers are the limits that exist, by their OCI names.
var rlimitNumbers = map[string]int{
	"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_CPU": unix.RLIMIT_CPU,
	"RLIMIT_DATA": unix.RLIMIT_DATA, "RLIMIT_FSIZE": unix.RLIMIT_FSIZE,
	"RLIMIT_LOCKS": unix.RLIMIT_LOCKS, "RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK,
	"RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE,
	"RLIMIT_NOFILE": unix.RLIMIT_NOFILE, "RLIMIT_NPROC": unix.RLIMIT_NPROC,
	"RLIMIT_RSS": unix.RLIMIT_RSS, "RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO,
	"RLIMIT_RTTIME": unix.RLIMIT_RTTIME, "RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING,
	"RLIMIT_STACK": unix.RLIMIT_STACK,
}

func hardLimits() map[string]uint64 {
	out := make(map[string]uint64, len(rlimitNumbers))
	for name, number := range rlimitNumbers {
		var l unix.Rlimit
		if unix.Getrlimit(number, &l) == nil {
			out[name] = l.Max
		}
	}
	return out
}

// mountSetattrWorks asks the kernel for the system call without changing anything: an
// unknown path is a different error from an unknown call.
func mountSetattrWorks() bool {
	err := unix.MountSetattr(-1, "/", unix.AT_RECURSIVE, &unix.MountAttr{})
	return !errors.Is(err, unix.ENOSYS)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func readsAs(path, want string) bool {
	raw, err := os.ReadFile(path)
	return err == nil && strings.TrimSpace(string(raw)) == want
}

// Rlimit is a POSIX resource limit.
type Rlimit struct {
	Soft, Hard uint64
}

// ClampRlimit lowers a limit to what the daemon can give.
func (h Facts) ClampRlimit(name string, l Rlimit) Rlimit {
	highest, known := h.HardLimits[name]
	if known && !h.MayRaiseLimits {
		l.Hard = min(l.Hard, highest)
	}
	l.Soft = min(l.Soft, l.Hard)
	return l
}

// ClampOOMScore raises a score to the lowest that the daemon can give. Kubelet asks for
// scores that a daemon without CAP_SYS_RESOURCE cannot set.
func (h Facts) ClampOOMScore(adj int) int {
	adj = max(-1000, min(adj, 1000))
	if h.MayLowerOOMScore {
		return adj
	}
	return max(adj, h.OOMScoreAdj)
}
