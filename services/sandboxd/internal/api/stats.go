package api

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/criview"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
)

// LayerUsage reads the use of a container's writable layer.
type LayerUsage interface {
	Usage(ctx context.Context, key, snapshotter string) (bytes, inodes uint64, err error)
	// Mountpoint is the folder that a snapshotter keeps its layers in.
	Mountpoint(snapshotter string) string
}

// CgroupReader reads the use of cgroups.
type CgroupReader interface {
	Container(attributes *criv1.ContainerAttributes, cgroupsPath string, layer *criv1.FilesystemUsage) *criv1.ContainerStats
	Pod(cgroupParent, netnsPath string, containers []*criv1.ContainerStats) *criv1.LinuxPodSandboxStats
}

// Stats gathers the resource use of containers and sandboxes.
type Stats struct {
	engine  *engine.Engine
	cgroups CgroupReader
	layers  LayerUsage
}

// NewStats returns the gatherer.
func NewStats(e *engine.Engine, cgroups CgroupReader, layers LayerUsage) *Stats {
	return &Stats{engine: e, cgroups: cgroups, layers: layers}
}

func (s *Stats) container(ctx context.Context, rec *recordv1.Container) (*criv1.ContainerStats, error) {
	cfg := rec.GetConfig()
	bytes, inodes, err := s.layers.Usage(ctx, rec.GetId(), rec.GetSnapshotter())
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return nil, err
	}
	layer := &criv1.FilesystemUsage{
		Timestamp:  time.Now().UnixNano(),
		FsId:       &criv1.FilesystemIdentifier{Mountpoint: s.layers.Mountpoint(rec.GetSnapshotter())},
		UsedBytes:  &criv1.UInt64Value{Value: bytes},
		InodesUsed: &criv1.UInt64Value{Value: inodes},
	}
	return s.cgroups.Container(&criv1.ContainerAttributes{
		Id: rec.GetId(), Metadata: cfg.GetMetadata(), Labels: cfg.GetLabels(), Annotations: cfg.GetAnnotations(),
	}, rec.GetCgroupsPath(), layer), nil
}

func (s *Stats) sandbox(ctx context.Context, rec *recordv1.Sandbox) (*criv1.PodSandboxStats, error) {
	cfg := rec.GetConfig()
	recs, err := s.engine.ContainerRecords(rec.GetId())
	if err != nil {
		return nil, err
	}
	var containers []*criv1.ContainerStats
	for _, c := range recs {
		if criview.ContainerState(c) != criv1.ContainerState_CONTAINER_RUNNING {
			continue
		}
		st, err := s.container(ctx, c)
		if err != nil {
			return nil, err
		}
		containers = append(containers, st)
	}
	return &criv1.PodSandboxStats{
		Attributes: &criv1.PodSandboxAttributes{
			Id: rec.GetId(), Metadata: cfg.GetMetadata(), Labels: cfg.GetLabels(), Annotations: cfg.GetAnnotations(),
		},
		Linux: s.cgroups.Pod(cfg.GetLinux().GetCgroupParent(), rec.GetNetnsPath(), containers),
	}, nil
}
