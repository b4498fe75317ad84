// Package podfiles makes what every container of a pod mounts: /etc/hosts, /etc/hostname,
// /etc/resolv.conf and /dev/shm.
//
// Files are written whole or not at all and can be read by everybody, whatever the umask of
// the daemon. Containers get copies and never the node's own files. Making the files of a
// sandbox twice renews them; removing them is idempotent and works after any restart. All
// methods may be called concurrently for different sandboxes. The package mounts nothing
// into containers.
package podfiles

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/pkg/atomicfile"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// DefaultShmSize is the size of a pod's /dev/shm in bytes.
	DefaultShmSize = 64 << 20

	hostShm = "/dev/shm"
	// maxHostFile bounds what is copied of a file of the node.
	maxHostFile = 1 << 20
)

// hostsFile is the /etc/hosts of a pod with a network of its own.
const hostsFile = `127.0.0.1	localhost
::1	localhost ip6-localhost ip6-loopback
fe00::	ip6-localnet
ff00::	ip6-mcastprefix
ff02::1	ip6-allnodes
ff02::2	ip6-allrouters
`

// Config says where things are.
type Config struct {
	// StateDir holds the files, RunDir the mounts, each below sandboxes/<id>.
	StateDir, RunDir string
	// HostEtc is the folder of the node's hosts and resolv.conf; empty means /etc.
	HostEtc string
	// ShmSize is the size of /dev/shm in bytes; 0 means DefaultShmSize.
	ShmSize int64
}

// Files makes and removes the files of pods.
type Files struct {
	cfg Config
}

// passable is the mode of folders that other users may walk through but not list.
const passable = 0o711

// New returns the maker of pod files.
func New(cfg Config) *Files {
	if cfg.HostEtc == "" {
		cfg.HostEtc = "/etc"
	}
	if cfg.ShmSize == 0 {
		cfg.ShmSize = DefaultShmSize
	}
	return &Files{cfg: cfg}
}

// Make writes hosts, hostname and resolv.conf and mounts /dev/shm for a sandbox. After an
// error nothing is left. Errors: ErrInvalidArgument for a host name or DNS configuration
// that would not fit the files.
func (f *Files) Make(ctx context.Context, sandboxID string, cfg *criv1.PodSandboxConfig) (pod.SandboxFiles, error) {
	if err := checkID(sandboxID); err != nil {
		return pod.SandboxFiles{}, err
	}
	contents, err := f.contents(cfg)
	if err != nil {
		return pod.SandboxFiles{}, fmt.Errorf("files of sandbox %q: %w", sandboxID, err)
	}
	paths := f.Paths(sandboxID, cfg)
	if err := f.make(sandboxID, paths, contents); err != nil {
		return pod.SandboxFiles{}, errors.Join(
			fmt.Errorf("files of sandbox %q: %w", sandboxID, err), f.Remove(ctx, sandboxID))
	}
	return paths, nil
}

func (f *Files) make(sandboxID string, paths pod.SandboxFiles, c contents) error {
	if err := makeDir(f.stateDir(sandboxID)); err != nil {
		return err
	}
	for _, file := range []struct{ path, content string }{
		{paths.Hosts, c.hosts},
		{paths.Hostname, c.hostname},
		{paths.ResolvConf, c.resolvConf},
	} {
		if err := write(file.path, file.content); err != nil {
			return err
		}
	}
	if paths.Shm == hostShm {
		return nil
	}
	return f.mountShm(paths.Shm)
}

// Paths returns what Make makes for a sandbox.
func (f *Files) Paths(sandboxID string, cfg *criv1.PodSandboxConfig) pod.SandboxFiles {
	dir := f.stateDir(sandboxID)
	shm := f.shmDir(sandboxID)
	if namespaceOptions(cfg).GetIpc() == criv1.NamespaceMode_NODE {
		shm = hostShm
	}
	return pod.SandboxFiles{
		Hosts:      filepath.Join(dir, "hosts"),
		Hostname:   filepath.Join(dir, "hostname"),
		ResolvConf: filepath.Join(dir, "resolv.conf"),
		Shm:        shm,
	}
}

// Remove unmounts and deletes what Make made; what is gone already is not an error.
func (f *Files) Remove(_ context.Context, sandboxID string) error {
	if err := checkID(sandboxID); err != nil {
		return err
	}
	shm := f.shmDir(sandboxID)
	// Any number of mounts may lie on each other after interrupted calls.
	var err error
	for err == nil {
		err = unix.Unmount(shm, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	// Never recursively: if something is mounted still, its files are not ours to delete.
	for _, dir := range []string{shm, filepath.Dir(shm)} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
			return fmt.Errorf("files of sandbox %q: %w", sandboxID, err)
		}
	}
	if _, err := os.Lstat(shm); err == nil {
		return fmt.Errorf("files of sandbox %q: %s is in use: %w", sandboxID, shm, errdefs.ErrUnavailable)
	}
	dir := f.stateDir(sandboxID)
	// Beside the files there may be temporary ones, of a process that was killed meanwhile.
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("files of sandbox %q: %w", sandboxID, err)
	}
	for _, e := range entries {
		if e.IsDir() {
			continue // not ours
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("files of sandbox %q: %w", sandboxID, err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return fmt.Errorf("files of sandbox %q: %w", sandboxID, err)
	}
	return nil
}

func (f *Files) stateDir(id string) string { return filepath.Join(f.cfg.StateDir, "sandboxes", id) }

func (f *Files) shmDir(id string) string {
	return filepath.Join(f.cfg.RunDir, "sandboxes", id, "shm")
}

func (f *Files) mountShm(dir string) error {
	if err := makeDir(dir); err != nil {
		return err
	}
	options := fmt.Sprintf("mode=1777,size=%d", f.cfg.ShmSize)
	err := unix.Mount("shm", dir, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options)
	if err != nil {
		return fmt.Errorf("mount shared memory on %s: %w", dir, err)
	}
	return nil
}

func checkID(id string) error {
	if id == "" || strings.HasPrefix(id, ".") || strings.ContainsRune(id, '/') {
		return fmt.Errorf("sandbox id %q: %w", id, errdefs.ErrInvalidArgument)
	}
	return nil
}

// makeDir makes a pod's folder in that of all pods. Other users may walk through both, as
// those of user namespaces must, but not list them.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, passable); err != nil {
		return err
	}
	return errors.Join(os.Chmod(filepath.Dir(dir), passable), os.Chmod(dir, passable))
}

// write puts a file in place that everybody may read, whatever the umask.
func write(path, content string) error {
	file, err := atomicfile.New(path, 0o644)
	if err != nil {
		return err
	}
	if _, err := file.Write([]byte(content)); err != nil {
		return errors.Join(err, file.Cancel())
	}
	if err := file.Close(); err != nil {
		return err
	}
	return os.Chmod(path, 0o644)
}

func namespaceOptions(cfg *criv1.PodSandboxConfig) *criv1.NamespaceOption {
	return cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()
}
