// Package bundle keeps the folders that shims work in.
//
// A pod has one folder, <root>/<sandbox id>, which is the bundle its shim is started in.
// The bundles of its containers lie below, in <root>/<sandbox id>/containers/<container id>:
// the shim's own clean-up command looks for a container next to its working folder.
//
// Folders appear and disappear atomically, by a rename from or to a hidden name, so that a
// crash never leaves half a bundle under a visible name. The package starts no process and
// talks to no shim.
package bundle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/identifiers"
	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	configFile     = "config.json"
	metaFile       = "sandbox.json"
	rootfsDir      = "rootfs"
	workDir        = "work"
	containersDir  = "containers"
	maxConfigBytes = 64 << 20
)

// Meta is what must be known of a pod's shim after a restart of the process, beside what
// the shim itself answered.
type Meta struct {
	// Sandboxer is the controller that made the sandbox.
	Sandboxer string `json:"sandboxer"`
	// RuntimeType is the type of the shim.
	RuntimeType string `json:"runtime_type"`
	// ShimPath is the shim's binary, absolute.
	ShimPath string `json:"shim_path"`
	// BootID is the boot of the machine in which the shim was started.
	BootID string `json:"boot_id"`
}

// Pod is the folder of one pod. Its methods may be used concurrently for different containers.
type Pod struct {
	id, dir string
}

// Open returns the folder of a pod, whether it exists or not. It fails with
// ErrInvalidArgument if the id cannot be the name of a folder.
func Open(root, id string) (Pod, error) {
	if err := identifiers.Validate(id); err != nil {
		return Pod{}, fmt.Errorf("sandbox id: %w", err)
	}
	return Pod{id: id, dir: filepath.Join(root, id)}, nil
}

// Create makes the folder of a pod with the given OCI configuration. It fails with
// ErrAlreadyExists if there is one.
func Create(root, id string, config []byte, meta Meta) (Pod, error) {
	p, err := Open(root, id)
	if err != nil {
		return Pod{}, err
	}
	encoded, err := json.Marshal(meta)
	if err != nil {
		return Pod{}, fmt.Errorf("sandbox %q: %w", id, err)
	}
	err = appear(p.dir, func(dir string) error {
		// Containers with a user namespace must be able to pass through.
		if err := os.Chmod(dir, 0o711); err != nil {
			return err
		}
		if err := mkdir(filepath.Join(dir, containersDir), 0o711); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, metaFile), encoded, 0o600); err != nil {
			return err
		}
		return fill(dir, config)
	})
	if err != nil {
		return Pod{}, fmt.Errorf("bundle of sandbox %q: %w", id, err)
	}
	return p, nil
}

// ID is the id of the sandbox.
func (p Pod) ID() string { return p.id }

// Dir is the bundle of the sandbox itself.
func (p Pod) Dir() string { return p.dir }

// Meta reads what Create was given.
func (p Pod) Meta() (Meta, error) {
	var m Meta
	data, err := ReadFile(filepath.Join(p.dir, metaFile), 1<<20)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("%s: %w: %w", metaFile, err, errdefs.ErrDataLoss)
	}
	return m, nil
}

// SaveMeta replaces what Create was given.
func (p Pod) SaveMeta(m Meta) error {
	data, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("sandbox %q: %w", p.id, err)
	}
	return WriteFile(filepath.Join(p.dir, metaFile), data)
}

// ContainerDir is the bundle of a container. The id of the sandbox names the sandbox's own
// init process, whose bundle is the sandbox's.
func (p Pod) ContainerDir(id string) string {
	if id == p.id {
		return p.dir
	}
	return filepath.Join(p.dir, containersDir, id)
}

// HasContainer says whether a container has a bundle.
func (p Pod) HasContainer(id string) bool {
	if identifiers.Validate(id) != nil {
		return false
	}
	if id == p.id {
		return p.HasInit()
	}
	_, err := os.Lstat(p.ContainerDir(id))
	return err == nil
}

// HasInit says whether the sandbox has an init process of its own: only then has its
// bundle a root file system.
func (p Pod) HasInit() bool {
	_, err := os.Lstat(filepath.Join(p.dir, initMarker))
	return err == nil
}

// initMarker is the file by which a sandbox with an init process is known.
const initMarker = "has-init"

// MarkInit notes that the sandbox has an init process of its own.
func (p Pod) MarkInit() error {
	return os.WriteFile(filepath.Join(p.dir, initMarker), nil, 0o600)
}

// CreateContainer makes the bundle of a container and returns its path. It fails with
// ErrAlreadyExists if there is one.
func (p Pod) CreateContainer(id string, config []byte) (string, error) {
	if err := identifiers.Validate(id); err != nil {
		return "", fmt.Errorf("container id: %w", err)
	}
	dir := p.ContainerDir(id)
	if id == p.id {
		return "", fmt.Errorf("container %q: has the id of its sandbox: %w", id, errdefs.ErrInvalidArgument)
	}
	if err := appear(dir, func(tmp string) error { return fill(tmp, config) }); err != nil {
		return "", fmt.Errorf("bundle of container %q: %w", id, err)
	}
	return dir, nil
}

// Containers lists the containers that have a bundle, the sandbox's own init last.
func (p Pod) Containers() ([]string, error) {
	ids, err := List(filepath.Join(p.dir, containersDir))
	if err != nil {
		return nil, err
	}
	if p.HasInit() {
		ids = append(ids, p.id)
	}
	return ids, nil
}

// RemoveContainer unmounts the container's root file system and removes its bundle. What is
// gone already is not an error. The sandbox's own init shares the sandbox's bundle, of which
// only its part is removed.
func (p Pod) RemoveContainer(id string) error {
	dir := p.ContainerDir(id)
	if err := Unmount(dir); err != nil {
		return fmt.Errorf("bundle of container %q: %w", id, err)
	}
	if id == p.id {
		for _, name := range []string{initMarker, exitFile, "init.pid"} {
			if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return nil
	}
	if err := vanish(dir); err != nil {
		return fmt.Errorf("bundle of container %q: %w", id, err)
	}
	return nil
}

// Remove removes the pod's folder with everything in it, after unmounting what is mounted
// in its bundles. What is gone already is not an error.
func (p Pod) Remove() error {
	ids, err := p.Containers()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("bundle of sandbox %q: %w", p.id, err)
	}
	for _, id := range ids {
		if err := p.RemoveContainer(id); err != nil {
			return err
		}
	}
	if err := Unmount(p.dir); err != nil {
		return fmt.Errorf("bundle of sandbox %q: %w", p.id, err)
	}
	if err := vanish(p.dir); err != nil {
		return fmt.Errorf("bundle of sandbox %q: %w", p.id, err)
	}
	return nil
}

// List lists the bundles under a root, without hidden folders. A
// root that does not exist has none.
func List(root string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		switch {
		case !e.IsDir():
		case identifiers.Validate(e.Name()) == nil:
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// Sweep removes the hidden rests that an interrupted creation or removal left under a root.
// Nothing else may be working under the root.
func Sweep(root string) error {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		dir := filepath.Join(root, e.Name())
		if e.IsDir() && strings.HasPrefix(e.Name(), ".") {
			errs = append(errs, Unmount(dir), os.RemoveAll(dir))
		} else if e.IsDir() {
			errs = append(errs, Sweep(filepath.Join(dir, containersDir)))
		}
	}
	return errors.Join(errs...)
}

// Unmount detaches everything that is mounted on a bundle's root file system and removes the
// empty mount point, so that removing the bundle can never reach into a mount.
func Unmount(dir string) error {
	rootfs := filepath.Join(dir, rootfsDir)
	mounted, err := mountinfo.Mounted(rootfs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !mounted {
		if err := os.Remove(rootfs); err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	}
	// Detaching returns at once where a plain unmount would wait for the disk.
	if err := mount.UnmountRecursive(rootfs, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", rootfs, err)
	}
	return os.RemoveAll(rootfs)
}

// appear makes a folder under a hidden name, fills it and gives it its real name.
func appear(dir string, fill func(tmp string) error) error {
	if _, err := os.Lstat(dir); err == nil {
		return fmt.Errorf("%s: %w", dir, errdefs.ErrAlreadyExists)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil {
		return err
	}
	tmp := hidden(dir, ".new-")
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return err
	}
	if err := fill(tmp); err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	if err := os.Rename(tmp, dir); err != nil {
		if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.ENOTEMPTY) {
			err = fmt.Errorf("%w: %w", errdefs.ErrAlreadyExists, err)
		}
		return errors.Join(err, os.RemoveAll(tmp))
	}
	return nil
}

// vanish takes a folder's name away and removes it then.
func vanish(dir string) error {
	tmp := hidden(dir, ".old-")
	// What an earlier removal could not finish, because a shim wrote into it, is in the way.
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	if err := os.Rename(dir, tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(tmp)
}

func hidden(dir, prefix string) string {
	return filepath.Join(filepath.Dir(dir), prefix+filepath.Base(dir))
}

// fill puts into a bundle what every bundle has.
func fill(dir string, config []byte) error {
	uid, gid, err := mappedRoot(config)
	if err != nil {
		return err
	}
	if gid != 0 {
		if err := os.Chown(dir, -1, gid); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o710); err != nil {
			return err
		}
	}
	for _, name := range []string{rootfsDir, workDir} {
		if err := mkdir(filepath.Join(dir, name), 0o711); err != nil {
			return err
		}
	}
	if uid != 0 || gid != 0 {
		// Where nothing is mounted on it, the root of the user namespace makes the mount points.
		if err := os.Chown(filepath.Join(dir, rootfsDir), uid, gid); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, configFile), config, 0o600)
}

// mkdir makes a folder with exactly this mode, whatever the umask.
func mkdir(dir string, mode os.FileMode) error {
	if err := os.Mkdir(dir, mode); err != nil {
		return err
	}
	return os.Chmod(dir, mode)
}

// mappedRoot is who the root of a container is on the host; 0, 0 without a user namespace.
func mappedRoot(config []byte) (uid, gid int, err error) {
	if !bytes.Contains(config, []byte(`"gidMappings"`)) {
		return 0, 0, nil
	}
	type mapping struct {
		ContainerID uint32 `json:"containerID"`
		HostID      uint32 `json:"hostID"`
	}
	var c struct {
		Linux struct {
			UIDMappings []mapping `json:"uidMappings"`
			GIDMappings []mapping `json:"gidMappings"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return 0, 0, fmt.Errorf("OCI specification: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	root := func(list []mapping) int {
		for _, m := range list {
			if m.ContainerID == 0 {
				return int(m.HostID)
			}
		}
		return 0
	}
	return root(c.Linux.UIDMappings), root(c.Linux.GIDMappings), nil
}
