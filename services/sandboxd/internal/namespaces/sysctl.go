package namespaces

import (
	"fmt"
	"maps"
	"math"
	"strings"

	"github.com/containerd/errdefs"
)

// Sysctls that belong to the IPC namespace besides fs.mqueue.*.
var ipcSysctls = map[string]bool{
	"kernel.msgmax": true, "kernel.msgmnb": true, "kernel.msgmni": true, "kernel.sem": true,
	"kernel.shmall": true, "kernel.shmmax": true, "kernel.shmmni": true,
	"kernel.shm_rmid_forced": true, "kernel.msg_next_id": true, "kernel.sem_next_id": true,
	"kernel.shm_next_id": true, "kernel.auto_msgmni": true,
}

// Sysctls of the pod's network that the defaults set.
const (
	sysctlPortStart = "net.ipv4.ip_unprivileged_port_start"
	sysctlPingRange = "net.ipv4.ping_group_range"
)

// sysctls checks the wanted sysctls and adds the defaults.
func (r Request) sysctls(defaults Defaults) (map[string]string, error) {
	out := make(map[string]string, len(r.Sysctls)+2)
	if r.Network && defaults.UnprivilegedPorts {
		out[sysctlPortStart] = "0"
	}
	if r.Network && defaults.UnprivilegedICMP && len(r.UIDs) == 0 {
		last := uint32(math.MaxInt32)
		if defaults.LastGroup != 0 {
			last = min(last, defaults.LastGroup) // the kernel takes no group that it does not know
		}
		out[sysctlPingRange] = fmt.Sprintf("0 %d", last)
	}
	for name, value := range defaults.Sysctls {
		if dotted := normalise(name); r.allowed(dotted) == nil {
			out[dotted] = value
		}
	}
	for name, value := range r.Sysctls {
		dotted := normalise(name)
		if err := r.allowed(dotted); err != nil {
			return nil, err
		}
		out[dotted] = value
	}
	return out, nil
}

// interfaceOf is the interface that a sysctl is of; empty if it is of none, or of one that each
// namespace has from its beginning.
func interfaceOf(name string) string {
	parts := strings.SplitN(name, ".", 5)
	if len(parts) < 5 || parts[0] != "net" || (parts[2] != "conf" && parts[2] != "neigh") {
		return ""
	}
	switch parts[3] {
	case "all", "default", "lo":
		return ""
	}
	return strings.ReplaceAll(parts[3], "/", ".")
}

// ofAttached are the sysctls of interfaces that plugins make, ofNamespace the others.
func ofAttached(sysctls map[string]string) map[string]string {
	out := maps.Clone(sysctls)
	maps.DeleteFunc(out, func(name, _ string) bool { return interfaceOf(name) == "" })
	return out
}

// ofNamespace are the sysctls but those of interfaces that plugins make.
func ofNamespace(sysctls map[string]string) map[string]string {
	out := maps.Clone(sysctls)
	maps.DeleteFunc(out, func(name, _ string) bool { return interfaceOf(name) != "" })
	return out
}

// CheckSysctl says whether a sysctl belongs to any namespace that pods may have. Errors:
// ErrInvalidArgument.
func CheckSysctl(name string) error {
	return Request{Network: true, IPC: true, UTS: true}.allowed(normalise(name))
}

// allowed says whether a sysctl belongs to a namespace that the pod has for itself.
func (r Request) allowed(name string) error {
	if strings.Contains(name, "..") || strings.ContainsAny(name, " \t\n") || name == "" {
		return fmt.Errorf("sysctl %q: bad name: %w", name, errdefs.ErrInvalidArgument)
	}
	var own bool
	var kind string
	switch {
	case strings.HasPrefix(name, "net."):
		own, kind = r.Network, "network"
	case ipcSysctls[name], strings.HasPrefix(name, "fs.mqueue."):
		own, kind = r.IPC, "IPC"
	case name == "kernel.domainname":
		own, kind = r.UTS, "UTS"
	default:
		return fmt.Errorf("sysctl %q is not part of a namespace of the pod: %w", name, errdefs.ErrInvalidArgument)
	}
	if !own {
		return fmt.Errorf("sysctl %q needs a %s namespace of the pod's own: %w", name, kind, errdefs.ErrInvalidArgument)
	}
	return nil
}

// normalise brings both spellings, a.b/c and a/b.c, to the form in which a dot separates
// the parts and a slash stands for a dot within one.
func normalise(name string) string {
	first := strings.IndexAny(name, "./")
	if first < 0 || name[first] == '.' {
		return name
	}
	return strings.Map(func(r rune) rune {
		switch r {
		case '.':
			return '/'
		case '/':
			return '.'
		}
		return r
	}, name)
}

// sysctlPath returns the file of a normalised sysctl.
func sysctlPath(name string) string {
	return "/proc/sys/" + strings.Map(func(r rune) rune {
		switch r {
		case '.':
			return '/'
		case '/':
			return '.'
		}
		return r
	}, name)
}
