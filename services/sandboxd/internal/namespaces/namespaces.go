// Package namespaces makes the namespaces of pods and keeps them alive by bind mounts, so
// that no process has to live in them.
//
// A pod's namespaces appear as <root>/<sandbox id>/{net,ipc,uts,user}. Making them either
// succeeds wholly or leaves nothing behind; removing them is idempotent and works after any
// restart, because the mounts are the only state. All methods may be called concurrently for
// different sandboxes. The package attaches no network: the network namespace has only its
// loopback interface, which is up.
package namespaces

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Request says which namespaces a pod needs and what to set in them.
type Request struct {
	// Network, IPC and UTS ask for a namespace of that kind.
	Network, IPC, UTS bool
	// Hostname is set in the UTS namespace; empty leaves the node's.
	Hostname string
	// Sysctls are written inside; each must belong to a namespace that is asked for. Those of
	// interfaces that a plugin makes wait for [Pins.SetInterfaces].
	Sysctls map[string]string
	// UIDs and GIDs are the mappings of a user namespace that owns the others; empty means
	// that the pod has none.
	UIDs, GIDs []*criv1.IDMapping
}

// Defaults are sysctls that every pod with such a namespace of its own gets unless it
// sets them itself.
type Defaults struct {
	// UnprivilegedPorts lets any user bind to ports below 1024.
	UnprivilegedPorts bool
	// UnprivilegedICMP lets any group send echo requests. It does not apply to pods with a
	// user namespace, in which the group range is not mapped.
	UnprivilegedICMP bool
	// LastGroup is the highest group that there is; 0 for all.
	LastGroup uint32
	// Sysctls are further ones, over those above; see [CheckSysctl].
	Sysctls map[string]string
}

// Pins makes, finds and removes pinned namespaces.
type Pins struct {
	root     string
	defaults Defaults
}

// New returns pins below root, such as /run/crisp/ns. The folder is made when needed.
func New(root string, defaults Defaults) *Pins {
	return &Pins{root: root, defaults: defaults}
}

// passable is the mode of folders that other users may walk through but not list.
const passable fs.FileMode = 0o711

// kinds are the namespaces in the order in which they are made and entered: the user
// namespace first, because it owns the others.
var kinds = []struct {
	oci, file string
	flag      uintptr
}{
	{"user", "user", unix.CLONE_NEWUSER},
	{"network", "net", unix.CLONE_NEWNET},
	{"ipc", "ipc", unix.CLONE_NEWIPC},
	{"uts", "uts", unix.CLONE_NEWUTS},
}

// Pin makes the wanted namespaces and returns their paths by OCI type: "network", "ipc",
// "uts", "user". Namespaces of the same sandbox that are there already are removed first.
// Errors: ErrInvalidArgument for a bad sandbox id, host name or sysctl.
func (p *Pins) Pin(ctx context.Context, sandboxID string, want Request) (map[string]string, error) {
	dir, err := p.dir(sandboxID)
	if err != nil {
		return nil, err
	}
	sysctls, err := want.sysctls(p.defaults)
	if err != nil {
		return nil, fmt.Errorf("sandbox %q: %w", sandboxID, err)
	}
	if want.UTS && len(want.Hostname) > 64 {
		return nil, fmt.Errorf("sandbox %q: host name of %d characters, at most 64 are possible: %w",
			sandboxID, len(want.Hostname), errdefs.ErrInvalidArgument)
	}
	if want.flags() == 0 {
		return map[string]string{}, nil
	}
	if err := p.Unpin(ctx, sandboxID); err != nil {
		return nil, err
	}
	if err := p.makeDir(dir); err != nil {
		return nil, fmt.Errorf("namespaces of sandbox %q: %w", sandboxID, err)
	}
	paths, err := pin(ctx, dir, want, ofNamespace(sysctls))
	if err != nil {
		return nil, errors.Join(
			fmt.Errorf("namespaces of sandbox %q: %w", sandboxID, err),
			p.Unpin(ctx, sandboxID))
	}
	return paths, nil
}

// SetInterfaces writes the sysctls of the interfaces that are attached to a pinned network
// namespace by now. Errors: ErrInvalidArgument for a sysctl of an interface that is not there
// or a value that the kernel refuses, ErrFailedPrecondition for a node that lets none be written.
func (p *Pins) SetInterfaces(sandboxID string, want Request) error {
	dir, err := p.dir(sandboxID)
	if err != nil {
		return err
	}
	sysctls, err := want.sysctls(p.defaults)
	if err != nil {
		return fmt.Errorf("sandbox %q: %w", sandboxID, err)
	}
	sysctls = ofAttached(sysctls)
	if len(sysctls) == 0 {
		return nil
	}
	err = Enter(func() error { return writeSysctls(sysctls) }, filepath.Join(dir, "net"))
	if err != nil {
		return fmt.Errorf("interfaces of sandbox %q: %w", sandboxID, err)
	}
	return nil
}

// pin makes the namespaces and mounts them below dir.
func pin(ctx context.Context, dir string, want Request, sysctls map[string]string) (map[string]string, error) {
	if want.flags()&unix.CLONE_NEWUSER == 0 {
		return pinThread(dir, want, sysctls)
	}
	return pinProcess(ctx, dir, want, sysctls)
}

// pinThread makes the namespaces on a thread, which is enough without a user namespace.
func pinThread(dir string, want Request, sysctls map[string]string) (map[string]string, error) {
	var paths map[string]string
	err := OnThread(func() error {
		if err := unix.Unshare(int(want.flags())); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := setUp(want, sysctls); err != nil {
			return err
		}
		var err error
		paths, err = mountAll(dir, fmt.Sprintf("/proc/self/task/%d/ns", unix.Gettid()), want)
		return err
	})
	return paths, err
}

func mountAll(dir, from string, want Request) (map[string]string, error) {
	paths := make(map[string]string)
	for _, k := range kinds {
		if want.flags()&k.flag == 0 {
			continue
		}
		target := filepath.Join(dir, k.file)
		f, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
		if err != nil {
			return nil, err
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
		if err := unix.Mount(filepath.Join(from, k.file), target, "", unix.MS_BIND, ""); err != nil {
			return nil, fmt.Errorf("mount %s namespace on %s: %w", k.oci, target, err)
		}
		paths[k.oci] = target
	}
	return paths, nil
}

// Paths returns the pinned namespaces of a sandbox by OCI type, for a record that has lost
// them. A file that is no namespace any more is left out.
func (p *Pins) Paths(sandboxID string) map[string]string {
	paths := make(map[string]string)
	dir, err := p.dir(sandboxID)
	if err != nil {
		return paths
	}
	for _, k := range kinds {
		if path := filepath.Join(dir, k.file); IsNamespace(path) {
			paths[k.oci] = path
		}
	}
	return paths
}

// Unpin unmounts and removes the namespaces of a sandbox. Processes and open files that
// still use one keep it alive. What is gone already is not an error.
func (p *Pins) Unpin(_ context.Context, sandboxID string) error {
	dir, err := p.dir(sandboxID)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("namespaces of sandbox %q: %w", sandboxID, err)
	}
	for _, e := range entries {
		if err := remove(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("namespaces of sandbox %q: %w", sandboxID, err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("namespaces of sandbox %q: %w", sandboxID, err)
	}
	return nil
}

// remove takes every mount off a file and deletes it.
func remove(path string) error {
	// Any error ends the loop: that it is no mount any more, or one that the removal below
	// meets too.
	var err error
	for err == nil {
		err = unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// List returns the ids of all sandboxes that have something pinned, so that orphans can be
// found after a restart.
func (p *Pins) List() ([]string, error) {
	entries, err := os.ReadDir(p.root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	ids := make([]string, 0, len(entries))
	for _, e := range entries {
		if e.IsDir() {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

func (p *Pins) dir(sandboxID string) (string, error) {
	if sandboxID == "" || strings.HasPrefix(sandboxID, ".") || strings.ContainsRune(sandboxID, '/') {
		return "", fmt.Errorf("sandbox id %q: %w", sandboxID, errdefs.ErrInvalidArgument)
	}
	return filepath.Join(p.root, sandboxID), nil
}

// makeDir makes the sandbox's folder. Its mode does not depend on the process's umask.
func (p *Pins) makeDir(dir string) error {
	if err := os.MkdirAll(p.root, passable); err != nil {
		return err
	}
	if err := os.Chmod(p.root, passable); err != nil {
		return err
	}
	if err := os.Mkdir(dir, passable); err != nil {
		return err
	}
	return os.Chmod(dir, passable)
}

func (r Request) flags() uintptr {
	var flags uintptr
	if r.Network {
		flags |= unix.CLONE_NEWNET
	}
	if r.IPC {
		flags |= unix.CLONE_NEWIPC
	}
	if r.UTS {
		flags |= unix.CLONE_NEWUTS
	}
	if len(r.UIDs) > 0 {
		flags |= unix.CLONE_NEWUSER
	}
	return flags
}
