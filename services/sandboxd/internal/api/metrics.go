package api

import (
	"context"
	"path"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// round is one gathering of the metrics of all pods: what need not be found out for each of
// them again. One goroutine uses it.
type round struct {
	reader      Reader
	running     map[string][]*recordv1.Container // by sandbox id; nil before the first pod
	filesystems map[string]podmetrics.Filesystem // by folder
	devices     map[[2]uint64]string
	groups      map[[3]string]bool // pods whose own cgroup was measured
}

func (s *Stats) newRound() *round {
	return &round{
		reader:      s.reader,
		filesystems: map[string]podmetrics.Filesystem{}, devices: map[[2]uint64]string{}, groups: map[[3]string]bool{},
	}
}

// metrics gathers the metrics of a sandbox and of its containers that run.
func (s *Stats) metrics(ctx context.Context, rec *recordv1.Sandbox, r *round) (*criv1.PodSandboxMetrics, error) {
	if r.running == nil {
		all, err := s.running("")
		if err != nil {
			return nil, err
		}
		r.running = make(map[string][]*recordv1.Container)
		for _, c := range all {
			r.running[c.GetSandboxId()] = append(r.running[c.GetSandboxId()], c)
		}
	}
	out := &criv1.PodSandboxMetrics{PodSandboxId: rec.GetId(), Metrics: s.podMetrics(rec, r)}
	for _, c := range r.running[rec.GetId()] {
		out.ContainerMetrics = append(out.ContainerMetrics, &criv1.ContainerMetrics{
			ContainerId: c.GetId(), Metrics: s.containerMetrics(ctx, rec, c, r),
		})
	}
	return out, nil
}

// podMetrics are those of the pod's own cgroup and those of its network. The latter bear
// the name and the place that a sandbox's own process would have, where dashboards look.
func (s *Stats) podMetrics(rec *recordv1.Sandbox, r *round) []*criv1.Metric {
	m := rec.GetConfig().GetMetadata()
	figures, ok := s.reader.MeasurePod(rec.GetConfig().GetLinux().GetCgroupParent())
	group := figures.Group
	labels := podmetrics.Labels{ID: group, Namespace: m.GetNamespace(), Pod: m.GetName()}
	var out []*criv1.Metric
	// Two sandboxes of one pod share its cgroup, and nobody may be told of it twice.
	key := [3]string{group, m.GetNamespace(), m.GetName()}
	if ok && !r.groups[key] {
		r.groups[key] = true
		out = s.table.Metrics(podmetrics.Sample{
			Labels: labels, Now: time.Now(), Started: rec.GetCreatedAt().AsTime(), Cgroup: &figures, DeviceName: r.device,
		})
	}
	if rec.GetNetnsPath() == "" {
		return out
	}
	labels.ID, labels.Name = path.Join(group, rec.GetId()), rec.GetId()
	return append(out, s.table.Metrics(podmetrics.Sample{
		Labels: labels, Interfaces: s.reader.Interfaces(rec.GetNetnsPath()), DeviceName: r.device,
	})...)
}

func (s *Stats) containerMetrics(ctx context.Context, rec *recordv1.Sandbox, c *recordv1.Container, r *round) []*criv1.Metric {
	m := rec.GetConfig().GetMetadata()
	sample := podmetrics.Sample{
		Labels: podmetrics.Labels{
			Container: c.GetConfig().GetMetadata().GetName(), ID: path.Join("/", c.GetId()),
			Image: criview.Container(c).GetImage().GetImage(), Name: c.GetId(), Namespace: m.GetNamespace(), Pod: m.GetName(),
		},
		Now: time.Now(), Started: c.GetStartedAt().AsTime(), DeviceName: r.device,
	}
	if c.GetCgroupsPath() != "" {
		figures := s.reader.Measure(c.GetCgroupsPath())
		processes := s.reader.Processes(c.GetCgroupsPath())
		sample.Labels.ID, sample.Cgroup, sample.Processes = figures.Group, &figures, &processes
	}
	if used := s.layers.Usage(ctx, c.GetId(), c.GetSnapshotter()); !used.At.IsZero() {
		fs := r.filesystem(s.layers.Mountpoint(c.GetSnapshotter()))
		sample.Layer = &podmetrics.Layer{Filesystem: fs, Used: used.Bytes, At: used.At}
	}
	return s.table.Metrics(sample)
}

func (r *round) filesystem(folder string) podmetrics.Filesystem {
	fs, ok := r.filesystems[folder]
	if !ok {
		fs = r.reader.Filesystem(folder)
		r.filesystems[folder] = fs
	}
	return fs
}

func (r *round) device(major, minor uint64) string {
	key := [2]uint64{major, minor}
	name, ok := r.devices[key]
	if !ok {
		name = r.reader.DeviceName(major, minor)
		r.devices[key] = name
	}
	return name
}
