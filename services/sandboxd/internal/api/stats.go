package api

import (
	"context"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/layerusage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/podmetrics"
)

// LayerUsage knows the use of containers' writable layers.
type LayerUsage interface {
	// Usage returns what a layer takes, from a moment ago.
	Usage(ctx context.Context, key, snapshotter string) layerusage.Usage
	// Mountpoint is the folder that a snapshotter keeps its layers in.
	Mountpoint(snapshotter string) string
}

// CgroupReader reads the use of cgroups.
type CgroupReader interface {
	Container(attributes *criv1.ContainerAttributes, cgroupsPath string, layer *criv1.FilesystemUsage) *criv1.ContainerStats
	Pod(cgroupParent, netnsPath string, groups []string, containers []*criv1.ContainerStats) *criv1.LinuxPodSandboxStats
}

// Measurer reads what the metrics are made of.
type Measurer interface {
	Measure(cgroupsPath string) podmetrics.Figures
	MeasurePod(cgroupParent string) (podmetrics.Figures, bool)
	Processes(cgroupsPath string) podmetrics.Processes
	Interfaces(netnsPath string) []podmetrics.Interface
	Filesystem(folder string) podmetrics.Filesystem
	DeviceName(major, minor uint64) string
}

// Reader reads resource use.
type Reader interface {
	CgroupReader
	Measurer
}

// Stats gathers the resource use of containers and sandboxes.
type Stats struct {
	engine *engine.Engine
	reader Reader
	layers LayerUsage
	table  *podmetrics.Table
}

// NewStats returns the gatherer.
func NewStats(e *engine.Engine, reader Reader, layers LayerUsage) *Stats {
	return &Stats{engine: e, reader: reader, layers: layers, table: podmetrics.New()}
}

func (s *Stats) container(ctx context.Context, rec *recordv1.Container) *criv1.ContainerStats {
	cfg := rec.GetConfig()
	return s.reader.Container(&criv1.ContainerAttributes{
		Id: rec.GetId(), Metadata: cfg.GetMetadata(), Labels: cfg.GetLabels(), Annotations: cfg.GetAnnotations(),
	}, rec.GetCgroupsPath(), s.layer(ctx, rec))
}

// patient ends as soon as nothing is waited for any more in one answer: figures that are not
// known by then are left out, and are there the next time.
func patient(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, layerusage.FirstWait)
}

// layer returns the use of a container's writable layer; nil if it is not known yet.
func (s *Stats) layer(ctx context.Context, rec *recordv1.Container) *criv1.FilesystemUsage {
	used := s.layers.Usage(ctx, rec.GetId(), rec.GetSnapshotter())
	if used.At.IsZero() {
		return nil
	}
	return &criv1.FilesystemUsage{
		Timestamp:  used.At.UnixNano(),
		FsId:       &criv1.FilesystemIdentifier{Mountpoint: s.layers.Mountpoint(rec.GetSnapshotter())},
		UsedBytes:  &criv1.UInt64Value{Value: used.Bytes},
		InodesUsed: &criv1.UInt64Value{Value: used.Inodes},
	}
}

func (s *Stats) sandbox(ctx context.Context, rec *recordv1.Sandbox) (*criv1.PodSandboxStats, error) {
	cfg := rec.GetConfig()
	running, err := s.running(rec.GetId())
	if err != nil {
		return nil, err
	}
	ctx, cancel := patient(ctx)
	defer cancel()
	groups := make([]string, 0, len(running))
	containers := make([]*criv1.ContainerStats, 0, len(running))
	for _, c := range running {
		containers = append(containers, s.container(ctx, c))
		groups = append(groups, c.GetCgroupsPath())
	}
	return &criv1.PodSandboxStats{
		Attributes: &criv1.PodSandboxAttributes{
			Id: rec.GetId(), Metadata: cfg.GetMetadata(), Labels: cfg.GetLabels(), Annotations: cfg.GetAnnotations(),
		},
		Linux: s.reader.Pod(cfg.GetLinux().GetCgroupParent(), rec.GetNetnsPath(), groups, containers),
	}, nil
}

// running returns the records of a sandbox's containers that run.
func (s *Stats) running(sandboxID string) ([]*recordv1.Container, error) {
	recs, err := s.engine.Views.Containers(sandboxID)
	if err != nil {
		return nil, err
	}
	var out []*recordv1.Container
	for _, c := range recs {
		if criview.ContainerState(c) == criv1.ContainerState_CONTAINER_RUNNING {
			out = append(out, c)
		}
	}
	return out, nil
}
