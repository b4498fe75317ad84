package container

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
)

// Stop sends the stop signal once, waits up to timeout and then kills everything
// in the container. With several callers the shortest timeout wins. It returns NRI's view
// of the stopped container, or nil for an unknown one.
func (u *UseCases) Stop(ctx context.Context, id string, timeout time.Duration) (*view.Container, error) {
	err := u.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	c, err := u.p.Table.Container(id)
	if errdefs.IsNotFound(err) || c.Record().GetState() == table.ContainerPreparing {
		return nil, nil //nolint:nilnil // an unknown container is a regular answer
	}
	err = u.p.Driver.Stop(ctx, c, timeout)
	if err != nil {
		return nil, fmt.Errorf("stop container %q: %w", id, err)
	}
	v := u.p.Views.Of(c)
	return &v, nil
}

// Remove kills the container if it runs and removes all of it. It returns NRI's
// last view of it, or nil for an unknown one. A failed removal can be repeated, also after
// a restart.
func (u *UseCases) Remove(ctx context.Context, id string) (*view.Container, error) {
	err := u.p.Table.Ready()
	if err != nil {
		return nil, err
	}
	c, err := u.p.Table.Container(id)
	if errdefs.IsNotFound(err) || c.Record().GetState() == table.ContainerPreparing {
		return nil, nil //nolint:nilnil // an unknown container is a regular answer
	}
	done, err := u.p.Driver.StopForGood(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("remove container %q: %w", id, err)
	}
	defer done()
	if _, err := u.p.Table.Container(id); err != nil {
		return nil, nil //nolint:nilnil // removed by a call that had its turn before
	}
	v := u.p.Views.Of(c)
	err = u.discard(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("remove container %q: %w", id, err)
	}
	return &v, nil
}

// discard removes everything of an ended container, its record last.
func (u *UseCases) discard(ctx context.Context, c *table.Container) error {
	err := u.p.Driver.Discard(ctx, c)
	if err != nil {
		return err
	}
	err = u.removeStorage(ctx, c.Record())
	if err != nil {
		return err
	}
	return u.p.Table.DropContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		var evs []*recordv1.Event
		// The follower of the end may have recorded the deletion by now.
		if !r.GetTaskDeleted() && r.GetPid() != 0 {
			deleted, err := event.TaskDelete(ctx, r)
			if err != nil {
				return nil, err
			}
			evs = append(evs, deleted)
		}
		gone, err := event.ContainerDelete(ctx, c.ID)
		return append(evs, gone), err
	})
}

// removeStorage removes root file system and folders of a container.
func (u *UseCases) removeStorage(ctx context.Context, rec *recordv1.Container) error {
	err := u.p.Rootfs.Remove(ctx, rec.GetId(), rec.GetSnapshotter())
	if err != nil {
		return fmt.Errorf("remove root file system: %w", err)
	}
	err = u.p.ImageVolumes.Release(ctx, rec.GetSandboxId(), rec.GetId())
	if err != nil {
		return fmt.Errorf("release image volumes: %w", err)
	}
	err = os.RemoveAll(filepath.Join(u.p.ContainerDir, rec.GetId()))
	if err != nil {
		return fmt.Errorf("remove folder: %w", err)
	}
	return nil
}

func (u *UseCases) volumeDir(id string) string {
	return filepath.Join(u.p.ContainerDir, id, "volumes") + string(filepath.Separator)
}
