// Package device gives containers their device nodes and the rules of the device cgroup, and
// injects devices that are described by CDI. All of it may be called concurrently.
package device

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	anyAccess = "rwm"
	// mostBelow bounds what is looked at in a folder of devices. What has more is none, such as
	// the root of the node.
	mostBelow = 10_000
)

// None denies everything but the nodes that every container has, such as /dev/null, whose
// rules are the OCI runtime's business.
func None() specs.LinuxDeviceCgroup { return specs.LinuxDeviceCgroup{Allow: false, Access: anyAccess} }

// Request is what the devices of a container are made from.
type Request struct {
	// Asked are the devices that the request lists.
	Asked []*criv1.Device
	// OfHost adds all of the host's nodes.
	OfHost bool
	// AllAllowed lets the container use every device, also those it has no node of.
	AllAllowed bool
	// UID and GID own the nodes of Asked; 0 leaves the host's owner. A runtime that binds the
	// host's nodes, as it does in a user namespace, does not heed them.
	UID, GID uint32
	// Follow resolves the links of a path on the node, with a time limit; it must be set if there
	// are devices in Asked.
	Follow func(path string) (string, error)
}

// Set sets device nodes and the rules of the device cgroup.
// Errors: ErrInvalidArgument, ErrNotFound for a device that is not there, ErrFailedPrecondition for
// one that cannot be looked at, ErrUnavailable if its file system does not answer.
func Set(spec *specs.Linux, req Request) error {
	rules := []specs.LinuxDeviceCgroup{None()}
	if req.OfHost {
		host, err := oci.HostDevices()
		if err != nil {
			return fmt.Errorf("devices of the host: %w", err)
		}
		spec.Devices = host
	}
	if req.AllAllowed {
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: true, Access: anyAccess})
	}
	for _, asked := range req.Asked {
		found, err := device(asked, req.Follow)
		if err != nil {
			return fmt.Errorf("device %q: %w", asked.GetHostPath(), judged(err))
		}
		for _, dev := range found {
			if req.UID != 0 {
				dev.UID = new(req.UID)
			}
			if req.GID != 0 {
				dev.GID = new(req.GID)
			}
			spec.Devices = slices.DeleteFunc(spec.Devices, func(have specs.LinuxDevice) bool { return have.Path == dev.Path })
			spec.Devices = append(spec.Devices, dev)
			rules = append(rules, specs.LinuxDeviceCgroup{
				Allow: true, Type: dev.Type, Major: new(dev.Major), Minor: new(dev.Minor), Access: accessOf(asked),
			})
		}
	}
	spec.Resources.Devices = append(rules, spec.Resources.Devices...)
	return nil
}

func accessOf(asked *criv1.Device) string {
	if asked.GetPermissions() == "" {
		return anyAccess
	}
	return asked.GetPermissions()
}

// judged gives what the node says of a path the kind of an error.
func judged(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", err, errdefs.ErrNotFound)
	case errors.Is(errdefs.Resolve(err), errdefs.ErrUnknown):
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}

// device finds the device nodes of a request: one, or all in a folder, nested ones too.
func device(asked *criv1.Device, follow func(string) (string, error)) ([]specs.LinuxDevice, error) {
	if strings.Trim(asked.GetPermissions(), anyAccess) != "" {
		return nil, fmt.Errorf("permissions %q: %w", asked.GetPermissions(), errdefs.ErrInvalidArgument)
	}
	if !filepath.IsAbs(asked.GetHostPath()) {
		return nil, fmt.Errorf("the path is not absolute: %w", errdefs.ErrInvalidArgument)
	}
	source, err := follow(asked.GetHostPath())
	if err != nil {
		return nil, err
	}
	target := asked.GetContainerPath()
	if target == "" {
		target = asked.GetHostPath()
	}
	info, err := os.Stat(source)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		dev, err := deviceAt(source, target)
		if err != nil {
			return nil, err
		}
		return []specs.LinuxDevice{dev}, nil
	}
	return devicesIn(source, target)
}

// devicesIn are the nodes in a folder and in those below.
func devicesIn(source, target string) ([]specs.LinuxDevice, error) {
	var out []specs.LinuxDevice
	seen := 0
	err := filepath.WalkDir(source, func(p string, e fs.DirEntry, err error) error {
		if seen++; seen > mostBelow {
			return fmt.Errorf("more than %d files, not a folder of devices: %w", mostBelow, errdefs.ErrInvalidArgument)
		}
		if err != nil || e.Type()&fs.ModeDevice == 0 {
			return err
		}
		below, err := filepath.Rel(source, p)
		if err != nil {
			return err
		}
		dev, err := deviceAt(p, path.Join(target, below))
		out = append(out, dev)
		return err
	})
	return out, err
}

func deviceAt(source, target string) (specs.LinuxDevice, error) {
	dev, err := oci.DeviceFromPath(source)
	if errors.Is(err, oci.ErrNotADevice) {
		return specs.LinuxDevice{}, fmt.Errorf("not a device: %w", errdefs.ErrInvalidArgument)
	}
	if err != nil {
		return specs.LinuxDevice{}, err
	}
	dev.Path = target
	return *dev, nil
}
