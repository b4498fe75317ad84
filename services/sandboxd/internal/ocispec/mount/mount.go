// Package mount gives containers their mounts. It looks at the sources on the node, and may make
// a missing one as a folder, which it tells of so that it can be undone. All of it may be called
// concurrently.
package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/namespace"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/security"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Policy is what the node can do and does about sources that are missing.
type Policy struct {
	Security security.Policy
	// RejectMissing makes a missing source an error, RejectPaths these paths alone.
	RejectMissing bool
	RejectPaths   []string
	// Defaults are read-only mounts of every container. Those of requests and images win.
	Defaults []Default
	// Sources looks for sources; it must be set.
	Sources *Sources
}

// Default is a mount that every container has.
type Default struct {
	Source, Destination string
}

// Request is what the mounts of a container are made from.
type Request struct {
	// Config is the container's configuration, SELinux its options in force, nil for none.
	Config  *criv1.ContainerConfig
	SELinux *criv1.SELinuxOption
	// Volumes are mounts for the volumes that the image declares. The ones of the request
	// win over them.
	Volumes []*criv1.Mount
	// ImageMounts are the folders in which image volumes are mounted on the node, by
	// container path of the CRI mount that asks for them.
	ImageMounts map[string]string
	// Files are the pod's files to mount.
	Files pod.SandboxFiles
	// OwnIPC is true if the pod has an IPC namespace of its own.
	OwnIPC bool
	// CgroupWritable lets the container write to its cgroups without being privileged. The
	// container must have a cgroup namespace of its own, so that it sees no others. The mounts
	// of a base specification stay as they are.
	CgroupWritable bool
}

// Set sets the mounts of a specification that has its mappings of users already. It returns the
// folders that were made for missing sources, parents last, also with an error. Errors:
// ErrInvalidArgument, ErrFailedPrecondition for what the host cannot do, ErrNotFound for a
// missing source, ErrUnavailable for one that hangs.
func (p Policy) Set(spec *specs.Spec, req Request) (created []string, err error) {
	d := &draft{Policy: p, in: req, spec: spec, sc: req.Config.GetLinux().GetSecurityContext()}
	err = d.mounts()
	return d.created, err
}

// draft is the mounts in the making.
type draft struct {
	Policy

	in      Request
	spec    *specs.Spec
	sc      *criv1.LinuxContainerSecurityContext
	created []string
}

// mounts sets the mounts. The request's mounts win over the image's volumes, these over the
// pod's files, and all of them over the default ones. Parents come before what lies below
// them.
func (d *draft) mounts() error {
	list := d.spec.Mounts
	if len(list) == 0 {
		list = d.defaultMounts()
	}
	var asked []specs.Mount
	for _, m := range d.in.Config.GetMounts() {
		mount, err := d.mount(m)
		if err != nil {
			return fmt.Errorf("mount %q: %w", m.GetContainerPath(), err)
		}
		asked = append(asked, mount)
	}
	taken := destinations(asked)
	if taken["/dev"] {
		list = slices.DeleteFunc(list, func(m specs.Mount) bool { return strings.HasPrefix(m.Destination, "/dev/") })
	}
	var extra []specs.Mount
	for _, m := range d.in.Volumes {
		if taken[path.Clean(m.GetContainerPath())] {
			continue
		}
		mount, err := d.mount(m)
		if err != nil {
			return fmt.Errorf("volume %q: %w", m.GetContainerPath(), err)
		}
		mount.UIDMappings, mount.GIDMappings = d.spec.Linux.UIDMappings, d.spec.Linux.GIDMappings
		extra = append(extra, mount)
	}
	for _, m := range d.podFiles() {
		if taken[m.Destination] || destinations(extra)[m.Destination] {
			continue
		}
		if !d.sc.GetPrivileged() {
			err := d.Security.Relabel(m.Source, d.in.SELinux)
			if err != nil {
				return fmt.Errorf("label of %q: %w", m.Destination, err)
			}
		}
		extra = append(extra, m)
	}
	asked = append(extra, asked...)
	for _, m := range d.Defaults {
		if destinations(asked)[path.Clean(m.Destination)] {
			continue
		}
		mount, err := d.defaultMount(m)
		if err != nil {
			return err
		}
		asked = append([]specs.Mount{mount}, asked...)
	}
	taken = destinations(asked)
	list = slices.DeleteFunc(list, func(m specs.Mount) bool { return taken[m.Destination] })
	list = append(list, asked...)
	slices.SortStableFunc(list, func(a, b specs.Mount) int { return depth(a.Destination) - depth(b.Destination) })
	d.spec.Mounts = list
	return nil
}

// defaultMount is a mount of every container. A source that is not there is the operator's to mend:
// containers without what they are meant to have are not made.
func (d *draft) defaultMount(m Default) (specs.Mount, error) {
	source, err := d.Sources.Follow(m.Source)
	switch {
	case errdefs.IsUnavailable(err):
		return specs.Mount{}, fmt.Errorf("mount %q of every container: %w", m.Destination, err)
	case err != nil:
		return specs.Mount{}, fmt.Errorf("mount %q of every container: %w: %w", m.Destination, err, errdefs.ErrFailedPrecondition)
	}
	return specs.Mount{Destination: path.Clean(m.Destination), Type: "bind", Source: source, Options: []string{"rbind", "rprivate", "ro"}}, nil
}

func destinations(mounts []specs.Mount) map[string]bool {
	out := make(map[string]bool, len(mounts))
	for _, m := range mounts {
		out[m.Destination] = true
	}
	return out
}

func depth(p string) int { return strings.Count(path.Clean(p), "/") }

// defaultMounts are the kernel's file systems in a container.
func (d *draft) defaultMounts() []specs.Mount {
	access := "ro"
	if d.sc.GetPrivileged() {
		access = "rw"
	}
	groups := access
	if d.in.CgroupWritable {
		groups = "rw"
	}
	sys := specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}}
	if d.foreign(d.Security.Host.ForeignNetwork) && d.sc.GetNamespaceOptions().GetNetwork() == criv1.NamespaceMode_NODE {
		// A sysfs can only be made by who owns the network namespace.
		sys = specs.Mount{Destination: "/sys", Type: "bind", Source: "/sys", Options: []string{"rbind", "nosuid", "noexec", "nodev", access}}
	}
	proc := specs.Mount{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}}
	if d.Security.Host.ForeignPID && d.sc.GetNamespaceOptions().GetPid() == criv1.NamespaceMode_NODE {
		proc.Type, proc.Source, proc.Options = "bind", "/proc", append([]string{"rbind"}, proc.Options...)
	}
	queues := []specs.Mount{{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}}}
	if d.foreign(d.Security.Host.ForeignIPC) && !d.in.OwnIPC {
		// So can message queues only by who owns the IPC namespace.
		queues = nil
		if exists("/dev/mqueue") {
			queues = []specs.Mount{{Destination: "/dev/mqueue", Type: "bind", Source: "/dev/mqueue", Options: []string{"rbind", "nosuid", "noexec", "nodev"}}}
		}
	}
	return append([]specs.Mount{
		proc,
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{
			Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"},
		},
		sys,
		{
			Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup",
			Options: []string{"nosuid", "noexec", "nodev", "relatime", groups},
		},
	}, queues...)
}

// foreign says whether a namespace of the node is not the container's user namespace's: if it has
// one of its own, or if not even the daemon's owns it.
func (d *draft) foreign(toDaemon bool) bool { return toDaemon || len(d.spec.Linux.UIDMappings) > 0 }

// podFiles are the mounts of what the runtime makes for the pod.
func (d *draft) podFiles() []specs.Mount {
	access := "rw"
	if d.sc.GetReadonlyRootfs() {
		access = "ro"
	}
	var out []specs.Mount
	for _, f := range []struct{ source, destination, access string }{
		{d.in.Files.Hostname, "/etc/hostname", access},
		{d.in.Files.Hosts, "/etc/hosts", access},
		{d.in.Files.ResolvConf, "/etc/resolv.conf", access},
		{d.in.Files.Shm, "/dev/shm", "rw"},
	} {
		if f.source == "" {
			continue
		}
		out = append(out, specs.Mount{
			Destination: f.destination, Type: "bind", Source: f.source,
			Options: []string{"rbind", "rprivate", f.access},
		})
		if f.source != d.in.Files.Shm {
			// They belong to the pod's root, not to nobody.
			out[len(out)-1].UIDMappings, out[len(out)-1].GIDMappings = d.spec.Linux.UIDMappings, d.spec.Linux.GIDMappings
		}
	}
	return out
}

// mountOptions are the options that a request may add to a mount.
var mountOptions = []string{
	"noexec", "exec", "nodev", "dev", "nosuid", "suid", "noatime", "atime", "nodiratime",
	"diratime", "relatime", "norelatime", "strictatime", "nosymfollow",
}

// mount turns a mount of the request into one of the specification.
func (d *draft) mount(m *criv1.Mount) (specs.Mount, error) {
	target := path.Clean(m.GetContainerPath())
	if !path.IsAbs(target) || target == "/" {
		return specs.Mount{}, fmt.Errorf("container path must be absolute and not the root: %w", errdefs.ErrInvalidArgument)
	}
	source, err := d.source(m)
	if err != nil {
		return specs.Mount{}, err
	}
	propagation, err := d.propagation(m.GetPropagation(), source)
	if err != nil {
		return specs.Mount{}, err
	}
	access, err := d.access(m)
	if err != nil {
		return specs.Mount{}, err
	}
	if m.GetSelinuxRelabel() && !d.sc.GetPrivileged() {
		if err := d.Security.Relabel(source, d.in.SELinux); err != nil {
			return specs.Mount{}, err
		}
	}
	options := []string{"rbind", propagation, access}
	for _, o := range m.GetMountOptions() {
		if !slices.Contains(mountOptions, o) {
			return specs.Mount{}, fmt.Errorf("mount option %q is not supported: %w", o, errdefs.ErrInvalidArgument)
		}
		options = append(options, o)
	}
	out := specs.Mount{Destination: target, Type: "bind", Source: source, Options: options}
	if m.GetImage() == nil { // the layers of an image are mapped already
		out.UIDMappings, out.GIDMappings = namespace.IDMappings(m.GetUidMappings()), namespace.IDMappings(m.GetGidMappings())
	}
	return out, nil
}

// access picks between writable, read-only, and read-only with everything below.
func (d *draft) access(m *criv1.Mount) (string, error) {
	switch {
	case m.GetRecursiveReadOnly():
		if !m.GetReadonly() || m.GetPropagation() != criv1.MountPropagation_PROPAGATION_PRIVATE {
			return "", fmt.Errorf("recursive read-only needs read-only and private propagation: %w", errdefs.ErrInvalidArgument)
		}
		if !d.Security.Host.RecursiveReadOnly {
			return "", fmt.Errorf("the kernel cannot make mounts recursively read-only: %w", errdefs.ErrFailedPrecondition)
		}
		return "rro", nil
	case m.GetReadonly(), m.GetImage() != nil:
		return "ro", nil
	default:
		return "rw", nil
	}
}

// source finds what is mounted, with links followed, and makes a missing folder.
func (d *draft) source(m *criv1.Mount) (string, error) {
	host := m.GetHostPath()
	if m.GetImage().GetImage() != "" {
		folder, ok := d.in.ImageMounts[m.GetContainerPath()]
		if !ok || host != "" {
			return "", fmt.Errorf("image %q is not mounted, or a host path is given too: %w", m.GetImage().GetImage(), errdefs.ErrInvalidArgument)
		}
		return folder, nil
	}
	if !filepath.IsAbs(host) {
		return "", fmt.Errorf("host path %q is not absolute: %w", host, errdefs.ErrInvalidArgument)
	}
	followed, err := d.Sources.Follow(host)
	switch {
	case err == nil:
		return followed, nil
	case errdefs.IsUnavailable(err):
		return "", fmt.Errorf("host path %q: %w", host, err)
	case !errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("host path %q: %w: %w", host, err, errdefs.ErrFailedPrecondition)
	}
	if _, err := os.Lstat(host); err == nil {
		return "", fmt.Errorf("host path %q is a link to nothing: %w", host, errdefs.ErrInvalidArgument)
	}
	if d.RejectMissing || slices.Contains(d.RejectPaths, filepath.Clean(host)) {
		return "", fmt.Errorf("host path %q: %w", host, errdefs.ErrNotFound)
	}
	if err := d.makeFolder(filepath.Clean(host)); err != nil {
		return "", fmt.Errorf("host path %q: %w: %w", host, err, errdefs.ErrFailedPrecondition)
	}
	return filepath.EvalSymlinks(host)
}

// makeFolder makes a folder and its parents and remembers which of them are new.
func (d *draft) makeFolder(folder string) error {
	var missing []string
	for p := folder; !exists(p); p = filepath.Dir(p) {
		missing = append(missing, p)
	}
	d.created = append(missing, d.created...)
	return os.MkdirAll(folder, 0o755)
}

// propagation returns the mount option, after a check that the source can propagate, and
// makes the root file system let it through.
func (d *draft) propagation(p criv1.MountPropagation, source string) (string, error) {
	root := &d.spec.Linux.RootfsPropagation
	switch p {
	case criv1.MountPropagation_PROPAGATION_PRIVATE:
		return "rprivate", nil
	case criv1.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		if *root != "rshared" {
			*root = "rslave"
		}
		return "rslave", propagates(source, "shared:", "master:")
	case criv1.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		*root = "rshared"
		return "rshared", propagates(source, "shared:")
	default:
		return "", fmt.Errorf("propagation %s: %w", p, errdefs.ErrInvalidArgument)
	}
}

// propagates checks that a path lies on a mount with one of the given properties.
func propagates(source string, properties ...string) error {
	infos, err := mountinfo.GetMounts(mountinfo.ParentsFilter(source))
	if err != nil {
		return fmt.Errorf("mounts above %q: %w", source, err)
	}
	var on *mountinfo.Info
	for _, info := range infos {
		// Of several mounts on one place the last one counts.
		if on == nil || len(info.Mountpoint) >= len(on.Mountpoint) {
			on = info
		}
	}
	if on == nil {
		return fmt.Errorf("no mount above %q: %w", source, errdefs.ErrFailedPrecondition)
	}
	for _, p := range properties {
		if strings.Contains(on.Optional, p) {
			return nil
		}
	}
	return fmt.Errorf("%q lies on mount %q, which does not propagate as asked: %w", source, on.Mountpoint, errdefs.ErrFailedPrecondition)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
