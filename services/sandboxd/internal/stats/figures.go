package stats

import (
	"math"
	"path"
	"slices"
	"strings"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// unlimited is the smallest value that counts as no limit: version 1 writes the largest
// number of whole pages.
const unlimited = math.MaxInt64 &^ (1<<16 - 1)

// Measure reads all figures of a cgroup. cgroupsPath is what an OCI specification has. It
// costs some twenty small files; Container and Pod read less.
func (r *Reader) Measure(cgroupsPath string) podmetrics.Figures { return r.measure(Path(cgroupsPath)) }

// MeasurePod is Measure for the cgroup of a pod, which CRI calls the parent of its
// containers; false, and no more than its path, if there is none.
func (r *Reader) MeasurePod(cgroupParent string) (podmetrics.Figures, bool) {
	group := ParentPath(cgroupParent)
	if !r.exists(group) {
		return podmetrics.Figures{Group: group}, false
	}
	return r.measure(group), true
}

func (r *Reader) measure(group string) podmetrics.Figures {
	f := r.basics(group)
	f.Group = group
	if r.unified {
		r.more2(group, &f)
	} else {
		r.more1(group, &f)
	}
	return f
}

// basics are the figures that stats are made of.
func (r *Reader) basics(group string) podmetrics.Figures {
	if r.unified {
		return r.version2(group)
	}
	return r.version1(group)
}

// exists tells whether there is a cgroup; the root is one for all and does not count.
func (r *Reader) exists(group string) bool {
	controller := "memory"
	if r.unified {
		controller = ""
	}
	return group != "/" && isFolder(path.Join(r.root, controller, group))
}

// ParentPath returns the folder of a pod's cgroup from what CRI calls cgroup_parent: a
// path, or the name of a systemd slice.
func ParentPath(cgroupParent string) string {
	if strings.HasSuffix(cgroupParent, ".slice") && !strings.Contains(strings.Trim(cgroupParent, "/"), "/") {
		return path.Join("/", slice(strings.Trim(cgroupParent, "/")))
	}
	return path.Join("/", cgroupParent)
}

// device returns the entry of a device in a list, which may grow.
func device(list []podmetrics.Device, major, minor uint64) ([]podmetrics.Device, *podmetrics.Device) {
	at := slices.IndexFunc(list, func(d podmetrics.Device) bool { return d.Major == major && d.Minor == minor })
	if at < 0 {
		at = len(list)
		list = append(list, podmetrics.Device{Major: major, Minor: minor, Bytes: map[string]uint64{}, IOs: map[string]uint64{}})
	}
	return list, &list[at]
}

// parseDevice reads "major:minor".
func parseDevice(s string) (major, minor uint64, ok bool) {
	first, second, ok := strings.Cut(s, ":")
	return parse(first), parse(second), ok
}
