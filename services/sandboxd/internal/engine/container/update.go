package container

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
)

// Update changes the resources of a created or running container. A refused
// change leaves cgroup and record as they were.
func (u *UseCases) Update(ctx context.Context, id string, linux *criv1.LinuxContainerResources, plugin *nri.LinuxResources, annotations map[string]string) (view.Container, error) {
	err := u.p.Table.Ready()
	if err != nil {
		return view.Container{}, err
	}
	c, err := u.p.Table.Container(id)
	if err != nil {
		return view.Container{}, err
	}
	done, err := c.Turn.Take(ctx)
	if err != nil {
		return view.Container{}, err
	}
	defer done()
	rec := c.Record()
	if s := rec.GetState(); s != table.ContainerCreated && s != table.ContainerRunning {
		return view.Container{}, fmt.Errorf("container %q is %s: %w", id, table.StateName(s), errdefs.ErrFailedPrecondition)
	}
	wanted := u.p.Specs.Merge(rec.GetResources(), linux)
	if plugin != nil {
		wanted = u.p.Specs.MergeNRI(wanted, plugin)
	}
	spec, err := c.Spec()
	if err != nil {
		return view.Container{}, err
	}
	before := oomScore(spec)
	change, err := u.p.Specs.SetResources(spec, wanted, plugin)
	if err != nil {
		return view.Container{}, fmt.Errorf("container %q: %w", id, err)
	}
	score := oomScore(spec)
	if score != nil {
		wanted.OomScoreAdj = int64(*score) // what the node can give
	}
	encoded, err := json.Marshal(spec)
	if err != nil {
		return view.Container{}, err
	}
	if rec.GetState() == table.ContainerRunning {
		err = u.p.Tasks.Update(ctx, c.Sandbox.ID, id, change, annotations)
		if err == nil {
			err = u.setOOMScore(ctx, c, before, score)
		}
		if err != nil {
			work.Undo(ctx, func(ctx context.Context) { u.restoreResources(ctx, c, rec) })
			return view.Container{}, fmt.Errorf("container %q: %w", id, err)
		}
	}
	err = u.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		r.Resources = wanted
		r.Spec = encoded
		return nil, nil
	})
	if err != nil {
		work.Undo(ctx, func(ctx context.Context) { u.restoreResources(ctx, c, rec) })
		return view.Container{}, err
	}
	return u.p.Views.Of(c), nil
}

// oomScore is the OOM score adjustment of a specification; nil for none.
func oomScore(spec *specs.Spec) *int {
	if spec.Process == nil {
		return nil
	}
	return spec.Process.OOMScoreAdj
}

// setOOMScore changes the OOM score adjustment of what runs in a container. OCI runtimes set it
// only when they start a process.
func (u *UseCases) setOOMScore(ctx context.Context, c *table.Container, before, after *int) error {
	if before == nil || after == nil || *before == *after {
		return nil
	}
	return u.p.Cgroups.SetOOMScore(ctx, c.ID, c.Record().GetCgroupsPath(), *before, *after)
}

// restoreResources brings a cgroup back to what the record says after a change that was
// refused half way.
func (u *UseCases) restoreResources(ctx context.Context, c *table.Container, rec *recordv1.Container) {
	spec, err := c.Spec()
	if err != nil {
		return
	}
	old, err := u.p.Specs.SetResources(spec, rec.GetResources(), nil)
	if err == nil && rec.GetState() == table.ContainerRunning {
		err = u.p.Tasks.Update(ctx, c.Sandbox.ID, c.ID, old, nil)
	}
	if err != nil {
		u.p.Log.WarnContext(ctx, "resources not restored", slog.String("container_id", c.ID), slog.Any("error", err))
	}
}
