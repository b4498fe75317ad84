package process

import (
	"fmt"
	"slices"
	"strings"

	capability "github.com/containerd/containerd/v2/pkg/cap"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const allCapabilities = "ALL"

// defaultCapabilities are what a container has without asking.
var defaultCapabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW",
	"CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE",
	"CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
}

// SetCapabilities sets what the first process may do. own is what the daemon itself could
// have, which ALL stands for. Dropping one that was added by name wins over adding it. Errors:
// ErrInvalidArgument for an unknown name, ErrFailedPrecondition for one that is not in own.
func SetCapabilities(p *specs.Process, sc *criv1.LinuxContainerSecurityContext, own []string) error {
	asked := sc.GetCapabilities()
	if sc.GetPrivileged() {
		p.Capabilities = capabilitySets(own, nil)
		return nil
	}
	add, err := names(asked.GetAddCapabilities(), own)
	if err != nil {
		return err
	}
	ambient, err := names(asked.GetAddAmbientCapabilities(), own)
	if err != nil {
		return err
	}
	drop, err := names(asked.GetDropCapabilities(), capability.Known())
	if err != nil {
		return err
	}
	have := slices.DeleteFunc(slices.Clone(defaultCapabilities), func(c string) bool {
		return !slices.Contains(own, c)
	})
	if slices.Contains(add, allCapabilities) {
		have = slices.Clone(own)
	}
	if slices.Contains(drop, allCapabilities) {
		have = nil
	}
	have = union(have, add, ambient)
	dropped := func(c string) bool { return c == allCapabilities || slices.Contains(drop, c) }
	p.Capabilities = capabilitySets(slices.DeleteFunc(have, dropped), slices.DeleteFunc(ambient, dropped))
	return nil
}

// capabilitySets are the sets of a process that has the given ones. The inheritable set stays empty but for
// what is ambient, so that files with inheritable capabilities give nothing away.
func capabilitySets(have, ambient []string) *specs.LinuxCapabilities {
	return &specs.LinuxCapabilities{
		Bounding:    slices.Clone(have),
		Effective:   slices.Clone(have),
		Permitted:   slices.Clone(have),
		Inheritable: slices.Clone(ambient),
		Ambient:     slices.Clone(ambient),
	}
}

// names brings the capabilities of a request to their full names. One that is not possible is
// an error.
func names(asked, possible []string) ([]string, error) {
	var out []string
	for _, name := range asked {
		name = strings.ToUpper(name)
		if name == allCapabilities {
			out = append(out, name)
			continue
		}
		if !strings.HasPrefix(name, "CAP_") {
			name = "CAP_" + name
		}
		if !slices.Contains(capability.Known(), name) {
			return nil, fmt.Errorf("unknown capability %q: %w", name, errdefs.ErrInvalidArgument)
		}
		if !slices.Contains(possible, name) {
			return nil, fmt.Errorf("capability %s is not in the runtime's own bounding set: %w", name, errdefs.ErrFailedPrecondition)
		}
		out = append(out, name)
	}
	return out, nil
}

func union(lists ...[]string) []string {
	var out []string
	for _, name := range slices.Concat(lists...) {
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}
