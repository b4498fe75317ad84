package controller

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
)

// mostWords is how much of what an OCI runtime says is searched for what it is about.
const mostWords = 64 << 10

// mostSaid is how much of what an OCI runtime says is told, its beginning and its end: what fails
// is in the one or in the other, and callers have limits of their own for errors.
const mostSaid = 8 << 10

// shortened leaves out the middle of a text that is too long to be told.
func shortened(text string) string {
	if len(text) <= mostSaid {
		return text
	}
	const half = mostSaid / 2
	return strings.ToValidUTF8(fmt.Sprintf("%s … (%d bytes) … %s", text[:half], len(text)-mostSaid, text[len(text)-half:]), "")
}

// refusal is a way in which runc or crun say that they cannot do what a specification asks for.
type refusal struct {
	words *regexp.Regexp
	// field names the part of the request that it is about.
	field func(match []string) string
}

func fixed(field string) func([]string) string { return func([]string) string { return field } }

// refusals are the known ones. OCI runtimes have nothing but words; what these say is shown
// whole in any case.
func refusals() []refusal {
	return []refusal{
		{regexp.MustCompile("(?:write|writing file) [`\"]?/sys/fs/cgroup/[^\\s:`\"]*/([a-zA-Z0-9_.]+)[`\"]?: "), func(m []string) string { return groupField(m[1]) }},
		{regexp.MustCompile(`unable to set memory limit to \d+`), fixed(resourceField("memory_limit_in_bytes"))},
		{regexp.MustCompile(`error mounting "[^"]*" to rootfs at "([^"]*)"`), mountField},
		{regexp.MustCompile("(?:mount|bind mount) `[^`]*` to `([^`]*)`: "), mountField},
		{regexp.MustCompile(`invalid mount &\{Source:.* Destination:(\S+) `), mountField},
		{regexp.MustCompile(`can't mask `), fixed("config.linux.security_context.masked_paths")},
		{regexp.MustCompile(`can't make "[^"]*" read-only`), fixed("config.linux.security_context.readonly_paths")},
		{regexp.MustCompile(`is not a valid (?:action|arch|operator|flag) for seccomp`), fixed("config.linux.security_context.seccomp")},
		{regexp.MustCompile(`error creating device nodes: |mknod `), fixed("config.devices")},
		{regexp.MustCompile("exec: \"[^\"]*\": |executable file `[^`]*` not found"), fixed(commandField)},
		{regexp.MustCompile("chdir to (?:cwd|`)|error during container init: mkdir "), fixed("config.working_dir")},
		// What no field of CRI asks for comes of the handler's base specification or of an NRI plugin.
		{regexp.MustCompile(`move netDevice (\S+) to namespace|error creating network interfaces: `), netDevice},
		{regexp.MustCompile(`set_mempolicy: `), fixed("linux.memory_policy")},
		{regexp.MustCompile(`error setting rlimits? |setrlimit `), fixed("rlimits")},
		{regexp.MustCompile(`error setting scheduler: |sched_setattr`), fixed("linux.scheduler")},
		{regexp.MustCompile(`failed to set io priority: `), fixed("linux.io_priority")},
		{regexp.MustCompile(`error setting (?:initial|final) CPU affinity: `), fixed("exec_cpu_affinity")},
		{regexp.MustCompile(`Intel RDT|intelrdt: |clos dir not accessible`), fixed("linux.rdt")},
		{regexp.MustCompile(`error running (\w+) hook #(\d+): `), func(m []string) string { return fmt.Sprintf("hooks: %s number %s", m[1], m[2]) }},
	}
}

func mountField(m []string) string { return fmt.Sprintf("config.mounts with container_path %q", m[1]) }

func netDevice(m []string) string {
	if m[1] == "" {
		return "linux.net_devices"
	}
	return fmt.Sprintf("linux.net_devices[%q]", m[1])
}

func resourceField(name string) string { return "config.linux.resources." + name }

// groupField is the field behind a file of a control group, of either hierarchy.
func groupField(file string) string {
	known := map[string]string{
		"cpuset.cpus": "cpuset_cpus", "cpuset.mems": "cpuset_mems",
		"cpu.shares": "cpu_shares", "cpu.weight": "cpu_shares",
		"cpu.cfs_quota_us": "cpu_quota", "cpu.cfs_period_us": "cpu_period", "cpu.max": "cpu_quota",
		"memory.limit_in_bytes": "memory_limit_in_bytes", "memory.max": "memory_limit_in_bytes",
		"memory.memsw.limit_in_bytes": "memory_swap_limit_in_bytes", "memory.swap.max": "memory_swap_limit_in_bytes",
	}
	if field, ok := known[file]; ok {
		return resourceField(field)
	}
	if strings.HasPrefix(file, "hugetlb.") {
		return resourceField("hugepage_limits")
	}
	return resourceField(fmt.Sprintf("unified[%q]", file))
}

// commandField is the field of a container's command, which of a request for an exec is called cmd.
const commandField, execField = "config.command", "cmd"

// explained gives an error of an OCI runtime that is about something in the request, for the first
// process of a container or for an exec of it, the class ErrFailedPrecondition, and names the field.
// Any other error stays as it is, but for its length: it is a failure of the runtime, or told in words of
// one that is not known here.
func explained(err error, execID string) error {
	if err == nil || !errdefs.IsInternal(err) {
		return err
	}
	text := strings.TrimSuffix(err.Error(), ": "+errdefs.ErrInternal.Error())
	for _, r := range refusals() {
		if m := r.words.FindStringSubmatch(text[:min(len(text), mostWords)]); m != nil {
			field := r.field(m)
			if execID != "" && field == commandField {
				field = execField
			}
			return fmt.Errorf("%s: %s: %w", field, shortened(text), errdefs.ErrFailedPrecondition)
		}
	}
	if len(text) > mostSaid {
		return fmt.Errorf("%s: %w", shortened(text), errdefs.ErrInternal)
	}
	return err
}
