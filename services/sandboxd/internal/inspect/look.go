package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect/rules"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	bootIDFile     = "/proc/sys/kernel/random/boot_id"
	bootstrapFile  = "bootstrap.json"
	containersPart = "containers"
)

// machine is what Look fills in.
type machine rules.Machine

// Look reads what is on the machine. groupParents are the cgroups below which containers
// may have theirs.
func Look(ctx context.Context, cfg config.Config, groupParents []string) (rules.Machine, error) {
	m := machine{Root: cfg.Root, State: cfg.State}
	boot, err := os.ReadFile(bootIDFile)
	if err != nil {
		return rules.Machine{}, err
	}
	m.Boot = strings.TrimSpace(string(boot))
	m.Running = inUse(filepath.Join(cfg.Root, "records.db"))
	err = errors.Join(
		m.lookAtBundles(), m.lookAtMounts(), m.lookAtFolders(), m.lookAtProcesses(),
		m.lookAtGroups(groupParents), m.lookAtLayers(ctx), m.lookAtErofs(ctx), m.lookAtAddresses(cfg.Network.ConfDir),
		m.lookAtRuntimes(cfg.Runtime.Handlers),
	)
	return rules.Machine(m), err
}

// inUse says whether a process has the database open. The shared lock that shows it is
// given back at once; who opens the database meanwhile tries again by itself.
func inUse(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }() // it was only locked
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// lookAtBundles reads the shims' folders and sockets.
func (m *machine) lookAtBundles() error {
	m.Bundles = map[string][]string{}
	shims := filepath.Join(m.State, "shims")
	ids, hidden, err := entries(shims)
	if err != nil {
		return err
	}
	m.Rests = append(m.Rests, hidden...)
	var sockets []string
	for _, id := range ids {
		containers, hidden, err := entries(filepath.Join(shims, id, containersPart))
		if err != nil {
			return err
		}
		m.Bundles[id] = containers
		m.Rests = append(m.Rests, hidden...)
		sockets = append(sockets, socketPath(readAddress(filepath.Join(shims, id))))
	}
	found, err := filepath.Glob(filepath.Join(m.State, "s", "*"))
	for _, path := range found {
		if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket && !slices.Contains(sockets, path) {
			m.Rests = append(m.Rests, path)
		}
	}
	return err
}

// readAddress is the address of the shim of a bundle; empty if it is not known.
func readAddress(bundle string) string {
	data, err := os.ReadFile(filepath.Join(bundle, bootstrapFile))
	if err != nil {
		return ""
	}
	var answer struct {
		Address string `json:"address"`
	}
	if json.Unmarshal(data, &answer) != nil {
		return ""
	}
	return answer.Address
}

// socketPath is what to dial for an address: the path of a socket, or the name of an
// abstract one.
func socketPath(address string) string {
	path, ok := strings.CutPrefix(address, "unix://")
	if ok || address == "" {
		return path
	}
	return "\x00" + address
}

// lookAtMounts lists the mounts below sandboxd's folders; the folders may be mounts
// themselves.
func (m *machine) lookAtMounts() error {
	all, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.Mountpoint, m.Root+"/") && !strings.HasPrefix(i.Mountpoint, m.State+"/"), false
	})
	if err != nil {
		return fmt.Errorf("mounts: %w", err)
	}
	for _, i := range all {
		if i.Mountpoint != m.Root && i.Mountpoint != m.State {
			m.Mounts = append(m.Mounts, i.Mountpoint)
		}
	}
	return nil
}

// lookAtFolders reads the folders that are named by ids.
func (m *machine) lookAtFolders() error {
	results := []string{}
	for _, f := range []struct {
		dir string
		to  *[]string
	}{
		{filepath.Join(m.State, "ns"), &m.Pins},
		{filepath.Join(m.State, "io"), &m.FIFOs},
		{filepath.Join(m.Root, "containers"), &m.Folders},
		{filepath.Join(m.Root, "sandboxes"), &m.PodFiles},
		{filepath.Join(m.State, "sandboxes"), &m.PodFiles},
		{filepath.Join(m.Root, "network", "attached"), &m.Attached},
		{filepath.Join(m.Root, "network", "results", "results"), &results},
	} {
		names, _, err := entries(f.dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			*f.to = append(*f.to, strings.TrimSuffix(name, ".json"))
		}
	}
	// The library names a result <network>-<id>-<interface>.
	for _, name := range results {
		m.Attached = append(m.Attached, idWithin.FindString(name))
	}
	for _, list := range []*[]string{&m.PodFiles, &m.Attached} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return nil
}

// lookAtRuntimes reads the state folders of OCI runtimes. The default one may be others' too.
func (m *machine) lookAtRuntimes(handlers map[string]config.Handler) error {
	for _, h := range handlers {
		if h.RuntimeRoot == "" {
			continue
		}
		ids, _, err := entries(filepath.Join(h.RuntimeRoot, pod.Namespace))
		if err != nil {
			return err
		}
		m.RuntimeStates = append(m.RuntimeStates, ids...)
	}
	slices.Sort(m.RuntimeStates)
	m.RuntimeStates = slices.Compact(m.RuntimeStates)
	return nil
}

// entries lists what is in a folder, the hidden entries apart and as paths. A folder that
// does not exist is empty.
func entries(dir string) (names, hidden []string, err error) {
	all, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	for _, e := range all {
		if strings.HasPrefix(e.Name(), ".") {
			hidden = append(hidden, filepath.Join(dir, e.Name()))
		} else {
			names = append(names, e.Name())
		}
	}
	return names, hidden, nil
}
