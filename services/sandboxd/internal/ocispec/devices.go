package ocispec

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

const anyAccess = "rwm"

// devices sets device nodes and the rules of the device cgroup. Rules for the nodes that
// every container has, such as /dev/null, are the OCI runtime's business.
func (d *draft) devices() error {
	rules := []specs.LinuxDeviceCgroup{{Allow: false, Access: anyAccess}}
	if d.privileged() && !d.in.Handler.PrivilegedWithoutHostDevices {
		host, err := oci.HostDevices()
		if err != nil {
			return fmt.Errorf("devices of the host: %w", err)
		}
		d.spec.Linux.Devices = host
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: true, Access: anyAccess})
	}
	for _, asked := range d.in.Config.GetDevices() {
		found, err := d.device(asked)
		if err != nil {
			return fmt.Errorf("device %q: %w", asked.GetHostPath(), err)
		}
		for _, dev := range found {
			d.spec.Linux.Devices = slices.DeleteFunc(d.spec.Linux.Devices, func(have specs.LinuxDevice) bool { return have.Path == dev.Path })
			d.spec.Linux.Devices = append(d.spec.Linux.Devices, dev)
			rules = append(rules, specs.LinuxDeviceCgroup{
				Allow: true, Type: dev.Type, Major: new(dev.Major), Minor: new(dev.Minor), Access: accessOf(asked),
			})
		}
	}
	d.spec.Linux.Resources.Devices = append(rules, d.spec.Linux.Resources.Devices...)
	return nil
}

func accessOf(asked *criv1.Device) string {
	if asked.GetPermissions() == "" {
		return anyAccess
	}
	return asked.GetPermissions()
}

// device finds the device nodes of a request: one, or all in a folder, nested ones too.
func (d *draft) device(asked *criv1.Device) ([]specs.LinuxDevice, error) {
	if strings.Trim(asked.GetPermissions(), anyAccess) != "" {
		return nil, fmt.Errorf("permissions %q: %w", asked.GetPermissions(), errdefs.ErrInvalidArgument)
	}
	if !filepath.IsAbs(asked.GetHostPath()) {
		return nil, fmt.Errorf("the path is not absolute: %w", errdefs.ErrInvalidArgument)
	}
	source, err := filepath.EvalSymlinks(asked.GetHostPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.ErrNotFound
	}
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
	var out []specs.LinuxDevice
	err = filepath.WalkDir(source, func(p string, e fs.DirEntry, err error) error {
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
