package ocispec

import (
	"fmt"
	"slices"
	"strings"

	capability "github.com/containerd/containerd/v2/pkg/cap"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

const allCapabilities = "ALL"

// defaultCapabilities are what a container has without asking.
var defaultCapabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW",
	"CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE",
	"CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
}

// capabilities sets what the first process may do. ALL stands for what the daemon itself
// could have. Dropping one that was added by name wins over adding it.
func (d *draft) capabilities() error {
	asked := d.sc.GetCapabilities()
	if d.privileged() {
		d.setCapabilities(d.host.Capabilities, nil)
		return nil
	}
	add, err := d.names(asked.GetAddCapabilities(), true)
	if err != nil {
		return err
	}
	ambient, err := d.names(asked.GetAddAmbientCapabilities(), true)
	if err != nil {
		return err
	}
	drop, err := d.names(asked.GetDropCapabilities(), false)
	if err != nil {
		return err
	}
	have := slices.DeleteFunc(slices.Clone(defaultCapabilities), func(c string) bool {
		return !slices.Contains(d.host.Capabilities, c)
	})
	if slices.Contains(add, allCapabilities) {
		have = slices.Clone(d.host.Capabilities)
	}
	if slices.Contains(drop, allCapabilities) {
		have = nil
	}
	have = union(have, add, ambient)
	dropped := func(c string) bool { return c == allCapabilities || slices.Contains(drop, c) }
	d.setCapabilities(slices.DeleteFunc(have, dropped), slices.DeleteFunc(ambient, dropped))
	return nil
}

// setCapabilities gives the first process a set. The inheritable set stays empty but for
// what is ambient, so that files with inheritable capabilities give nothing away.
func (d *draft) setCapabilities(have, ambient []string) {
	d.spec.Process.Capabilities = &specs.LinuxCapabilities{
		Bounding:    slices.Clone(have),
		Effective:   slices.Clone(have),
		Permitted:   slices.Clone(have),
		Inheritable: slices.Clone(ambient),
		Ambient:     slices.Clone(ambient),
	}
}

// names brings the capabilities of a request to their full names. One that the daemon
// cannot give is an error if it is wanted.
func (d *draft) names(asked []string, wanted bool) ([]string, error) {
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
		if wanted && !slices.Contains(d.host.Capabilities, name) {
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
