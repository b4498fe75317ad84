package engine

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
)

// UpdateContainer changes the resources of a created or running container. A refused
// change leaves cgroup and record as they were.
func (e *Engine) UpdateContainer(ctx context.Context, id string, linux *criv1.LinuxContainerResources, plugin *nri.LinuxResources, annotations map[string]string) (ContainerView, error) {
	err := e.ready()
	if err != nil {
		return ContainerView{}, err
	}
	c, err := e.container(id)
	if err != nil {
		return ContainerView{}, err
	}
	done, err := c.turn.take(ctx)
	if err != nil {
		return ContainerView{}, err
	}
	defer done()
	rec := c.rec.Load()
	if s := rec.GetState(); s != containerCreated && s != containerRunning {
		return ContainerView{}, fmt.Errorf("container %q is %s: %w", id, stateName(s), errdefs.ErrFailedPrecondition)
	}
	wanted := e.p.Specs.Merge(rec.GetResources(), linux)
	if plugin != nil {
		wanted = e.p.Specs.MergeNRI(wanted, plugin)
	}
	spec, err := c.specOf()
	if err != nil {
		return ContainerView{}, err
	}
	before := oomScore(spec)
	change, err := e.p.Specs.SetResources(spec, wanted, plugin)
	if err != nil {
		return ContainerView{}, fmt.Errorf("container %q: %w", id, err)
	}
	score := oomScore(spec)
	if score != nil {
		wanted.OomScoreAdj = int64(*score) // what the node can give
	}
	encoded, err := json.Marshal(spec)
	if err != nil {
		return ContainerView{}, err
	}
	if rec.GetState() == containerRunning {
		err = e.p.Tasks.Update(ctx, c.sandbox.id, id, change, annotations)
		if err == nil {
			err = e.setOOMScore(ctx, c, before, score)
		}
		if err != nil {
			undo(ctx, func(ctx context.Context) { e.restoreResources(ctx, c, rec) })
			return ContainerView{}, fmt.Errorf("container %q: %w", id, err)
		}
	}
	err = e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		r.Resources = wanted
		r.Spec = encoded
		return nil, nil
	})
	if err != nil {
		undo(ctx, func(ctx context.Context) { e.restoreResources(ctx, c, rec) })
		return ContainerView{}, err
	}
	return e.view(c), nil
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
func (e *Engine) setOOMScore(ctx context.Context, c *container, before, after *int) error {
	if before == nil || after == nil || *before == *after {
		return nil
	}
	return e.p.Cgroups.SetOOMScore(ctx, c.id, c.rec.Load().GetCgroupsPath(), *before, *after)
}

// restoreResources brings a cgroup back to what the record says after a change that was
// refused half way.
func (e *Engine) restoreResources(ctx context.Context, c *container, rec *recordv1.Container) {
	spec, err := c.specOf()
	if err != nil {
		return
	}
	old, err := e.p.Specs.SetResources(spec, rec.GetResources(), nil)
	if err == nil && rec.GetState() == containerRunning {
		err = e.p.Tasks.Update(ctx, c.sandbox.id, c.id, old, nil)
	}
	if err != nil {
		e.log.WarnContext(ctx, "resources not restored", slog.String("container_id", c.id), slog.Any("error", err))
	}
}
