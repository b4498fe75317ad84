package container

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"

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
	// A process that waits for its start is in the cgroup already.
	live := rec.GetState() == table.ContainerRunning || c.Waiting.Load() != nil
	before, pages := oomScore(spec), hugepages(spec)
	change, undo, err := u.p.Specs.SetResources(spec, wanted, plugin)
	if err != nil {
		return view.Container{}, fmt.Errorf("container %q: %w", id, err)
	}
	if live && !maps.Equal(pages, hugepages(spec)) {
		// OCI runtimes have no way to change them, and would say nothing.
		return view.Container{}, fmt.Errorf("container %q: limits of huge pages cannot change while it runs: %w", id, errdefs.ErrFailedPrecondition)
	}
	score := oomScore(spec)
	if score != nil {
		wanted.OomScoreAdj = int64(*score) // what the node can give
	}
	encoded, err := json.Marshal(spec)
	if err != nil {
		return view.Container{}, err
	}
	if live {
		u.keepSets(rec, change, undo)
		err = refused(u.p.Tasks.Update(ctx, c.Sandbox.ID, id, change, annotations))
		if err == nil {
			err = u.setOOMScore(ctx, c, before, score)
		}
		if err != nil {
			work.Undo(ctx, func(ctx context.Context) { u.restoreResources(ctx, c, undo) })
			return view.Container{}, err
		}
	}
	err = u.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		r.Resources = wanted
		r.Spec = encoded
		return nil, nil
	})
	if err != nil {
		work.Undo(ctx, func(ctx context.Context) {
			u.restoreResources(ctx, c, undo)
			if scoreErr := u.setOOMScore(ctx, c, score, before); scoreErr != nil {
				u.p.Log.WarnContext(ctx, "OOM score not restored", slog.String("container_id", c.ID), slog.Any("error", scoreErr))
			}
		})
		return view.Container{}, err
	}
	return u.p.Views.Of(c), nil
}

// keepSets completes what takes a change back by the sets of processors and memory nodes that
// are in force: a container that was given none has its parent's, and no value stands for that.
func (u *UseCases) keepSets(rec *recordv1.Container, change, undo *specs.LinuxResources) {
	if change.CPU == nil || change.CPU.Cpus == "" && change.CPU.Mems == "" {
		return
	}
	if undo.CPU == nil {
		undo.CPU = &specs.LinuxCPU{}
	}
	cpus, mems := u.p.Cgroups.Sets(rec.GetCgroupsPath())
	if change.CPU.Cpus != "" && undo.CPU.Cpus == "" {
		undo.CPU.Cpus = cpus
	}
	if change.CPU.Mems != "" && undo.CPU.Mems == "" {
		undo.CPU.Mems = mems
	}
}

// refused classifies what an OCI runtime says about a change. Its words have no class: the
// kernel refused a value, or the container has just ended.
func refused(err error) error {
	if err != nil && (errdefs.IsInternal(err) || errdefs.IsUnknown(err)) {
		return fmt.Errorf("the change is refused: %w: %v", errdefs.ErrFailedPrecondition, err) //nolint:errorlint // the cause's class must not win
	}
	return err
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
	err := u.p.Cgroups.SetOOMScore(ctx, c.ID, c.Record().GetCgroupsPath(), *before, *after)
	if err != nil {
		return fmt.Errorf("container %q: OOM score adjustment: %w", c.ID, err)
	}
	return nil
}

// hugepages are the limits of huge pages of a specification by page size.
func hugepages(spec *specs.Spec) map[string]uint64 {
	out := map[string]uint64{}
	if spec.Linux != nil && spec.Linux.Resources != nil {
		for _, l := range spec.Linux.Resources.HugepageLimits {
			out[l.Pagesize] = l.Limit
		}
	}
	return out
}

// restoreResources brings the cgroup of a running container back to what it was before a
// change that was refused half way.
func (u *UseCases) restoreResources(ctx context.Context, c *table.Container, undo *specs.LinuxResources) {
	if c.Record().GetState() != table.ContainerRunning && c.Waiting.Load() == nil {
		return
	}
	err := u.p.Tasks.Update(ctx, c.Sandbox.ID, c.ID, undo, nil)
	if err != nil {
		u.p.Log.WarnContext(ctx, "resources not restored", slog.String("container_id", c.ID), slog.Any("error", err))
	}
}
