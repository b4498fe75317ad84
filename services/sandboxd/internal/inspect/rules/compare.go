package rules

import (
	"path/filepath"
	"slices"
	"strings"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// Machine is what is on the machine in sandboxd's places.
type Machine struct {
	// Root, State and Boot are the folders of sandboxd and the boot id of the kernel.
	Root, State, Boot string
	// Running says that a sandboxd has the records open.
	Running bool
	// Bundles are the sandboxes with a bundle, with the containers that have one in it.
	Bundles map[string][]string
	// Rests are hidden folders of an interrupted creation or removal, sockets without shim
	// and the like, as paths.
	Rests []string
	// Shims are the process ids of shims by sandbox.
	Shims map[string][]int
	// Pids are all process ids.
	Pids map[int]bool
	// Mounts are the mount points below Root and State.
	Mounts []string
	// Pins are the sandboxes with pinned namespaces.
	Pins []string
	// Cgroups are the groups that are named by an id, by that id.
	Cgroups map[string][]string
	// RuntimeStates are the containers and sandboxes that an OCI runtime still holds state of,
	// as far as its state folder is sandboxd's alone.
	RuntimeStates []string
	// Layers are the keys of the containers' writable layers; Layered says whether they
	// could be read.
	Layers  []string
	Layered bool
	// Lower are the mount points of image layers that containers and volumes are on top of, of a
	// snapshotter that mounts each layer.
	Lower []string
	// FIFOs and Folders are the containers with a folder of FIFOs and of volumes.
	FIFOs, Folders []string
	// PodFiles are the sandboxes with files or a /dev/shm.
	PodFiles []string
	// Attached are the sandboxes that the network code remembers, Addresses those that the
	// host-local plugin holds an address for, by address file.
	Attached  []string
	Addresses map[string]string
}

// known is what the records explain.
type known struct {
	sandboxes  map[string]*recordv1.Sandbox
	containers map[string]*recordv1.Container
	releases   map[string]bool
}

func index(rec Records) known {
	k := known{sandboxes: map[string]*recordv1.Sandbox{}, containers: map[string]*recordv1.Container{}, releases: map[string]bool{}}
	for _, s := range rec.Sandboxes {
		k.sandboxes[s.GetId()] = s
	}
	for _, c := range rec.Containers {
		k.containers[c.GetId()] = c
	}
	for _, n := range rec.Releases {
		k.releases[n.GetSandboxId()] = true
	}
	return k
}

// live says whether a sandbox has a record and may hold a shim and namespaces.
func (k known) live(id string) bool {
	s := k.sandboxes[id]
	return s != nil && s.GetState() != stopped
}

// tasked says whether a container may have a task: a bundle, a root mount, a cgroup. A
// sandbox's init has the sandbox's id.
func (k known) tasked(id string) bool {
	if c := k.containers[id]; c != nil {
		return !c.GetTaskDeleted()
	}
	return k.live(id)
}

// networked says whether a sandbox may hold an address.
func (k known) networked(id string) bool {
	return k.releases[id] || k.sandboxes[id].GetNetworkAttached()
}

// Compare checks records against the machine, both ways.
func Compare(rec Records, m Machine) []Finding {
	var r report
	k := index(rec)
	r.orphans(k, m)
	r.orphanMounts(k, m)
	for _, s := range rec.Sandboxes {
		if s.GetState() == ready && s.GetBootId() == m.Boot {
			r.missing(s, m)
		}
	}
	for _, c := range rec.Containers {
		if m.Layered && !slices.Contains(m.Layers, c.GetId()) {
			r.add("missing.layer", c.GetId(), "the container has no writable layer")
		}
		if m.Running && c.GetState() == running && c.GetBootId() == m.Boot && !m.Pids[int(c.GetPid())] {
			r.add("missing.process", c.GetId(), "the container runs, but not as process %d", c.GetPid())
		}
	}
	return r
}

// missing checks that a READY sandbox has what it needs.
func (r *report) missing(s *recordv1.Sandbox, m Machine) {
	id := s.GetId()
	if _, ok := m.Bundles[id]; !ok {
		r.add("missing.bundle", id, "the sandbox is READY and has no bundle")
	}
	if s.GetExitedAt() == nil && m.Running && len(m.Shims[id]) == 0 {
		r.add("missing.shim", id, "the sandbox is READY and has no shim process")
	}
	if path := s.GetNetnsPath(); path != "" && !slices.Contains(m.Mounts, path) {
		r.add("missing.namespace", id, "nothing is mounted on %s", path)
	}
}

// orphans finds what no record explains, except mounts.
func (r *report) orphans(k known, m Machine) {
	for id, containers := range m.Bundles {
		if !k.live(id) {
			r.add("orphan.bundle", id, "%s", k.why("bundle", id))
		}
		for _, c := range containers {
			if !k.tasked(c) {
				r.add("orphan.bundle", c, "%s", k.why("bundle", c))
			}
		}
	}
	for id, pids := range m.Shims {
		if !k.live(id) {
			r.add("orphan.shim", id, "%s; processes %v", k.why("shim", id), pids)
		}
	}
	for id, dirs := range m.Cgroups {
		if !k.tasked(id) {
			r.add("orphan.cgroup", id, "%s; %s", k.why("cgroup", id), strings.Join(dirs, ", "))
		}
	}
	for file, id := range m.Addresses {
		if !k.networked(id) {
			r.add("orphan.address", file, "is held for %s, which has no network", id)
		}
	}
	for _, path := range m.Rests {
		r.add("orphan.rest", path, "was left by something that did not end")
	}
	for _, set := range []struct {
		what string
		ids  []string
		has  func(string) bool
	}{
		{"namespaces", m.Pins, k.live},
		{"runtime-state", m.RuntimeStates, k.tasked},
		{"layer", m.Layers, func(id string) bool { return k.containers[id] != nil }},
		{"fifos", m.FIFOs, func(id string) bool { return k.containers[id] != nil }},
		{"folder", m.Folders, func(id string) bool { return k.containers[id] != nil }},
		{"files", m.PodFiles, func(id string) bool { return k.sandboxes[id] != nil }},
		{"network", m.Attached, k.networked},
	} {
		for _, id := range set.ids {
			if !set.has(id) {
				r.add("orphan."+set.what, id, "%s", k.why(set.what, id))
			}
		}
	}
}

// why says why an object is an orphan.
func (k known) why(what, id string) string {
	if c := k.containers[id]; c != nil {
		return what + " of a container whose task is deleted (" + ContainerState(c) + ")"
	}
	if s := k.sandboxes[id]; s != nil {
		return what + " of a sandbox that is " + SandboxState(s)
	}
	return what + " without a record"
}

// orphanMounts finds mounts that no record explains.
func (r *report) orphanMounts(k known, m Machine) {
	for _, path := range m.Mounts {
		if !k.explains(path, m) {
			r.add("orphan.mount", path, "no record explains the mount")
		}
	}
}

// explains says whether a record accounts for a mount: pinned namespaces, a pod's /dev/shm,
// root file systems of tasks, the layers below them and a pod's volumes of images.
func (k known) explains(path string, m Machine) bool {
	rel, err := filepath.Rel(m.State, path)
	if err != nil || !filepath.IsLocal(rel) {
		return k.explainsLasting(path, m)
	}
	switch p := strings.Split(rel, "/"); {
	case len(p) == 3 && p[0] == "ns":
		return k.live(p[1])
	case len(p) == 3 && p[0] == "sandboxes" && p[2] == "shm":
		return k.sandboxes[p[1]] != nil
	case len(p) >= 3 && p[0] == "shims" && p[2] == "rootfs":
		return k.live(p[1])
	case len(p) >= 5 && p[0] == "shims" && p[2] == "containers" && p[4] == "rootfs":
		return k.tasked(p[3])
	}
	return false
}

// explainsLasting says it of a mount below Root. Others than these are not there for long.
func (k known) explainsLasting(path string, m Machine) bool {
	rel, err := filepath.Rel(m.Root, path)
	if err != nil {
		return false
	}
	p := strings.Split(rel, "/")
	if len(p) == 4 && p[0] == "volumes" && p[3] == "root" {
		return k.sandboxes[p[1]] != nil
	}
	return slices.Contains(m.Lower, path)
}
