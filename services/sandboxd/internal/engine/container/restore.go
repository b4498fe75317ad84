package container

import (
	"context"
	"fmt"
	"io"
	"path/filepath"

	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/checkpoint"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
)

// takeCheckpoint gives a container that is being made what a checkpoint has of it: the
// changes to the root file system, the image's volumes, and a copy of the state of its
// processes, from which they are restored when the container is started.
func (u *UseCases) takeCheckpoint(ctx context.Context, c *table.Container, from string) error {
	err := c.Layer.Wait(ctx)
	if err != nil {
		return err
	}
	rec := c.Record()
	name := rec.GetConfig().GetMetadata().GetName()
	err = checkpoint.RootfsChanges(from, name, func(changes io.Reader) error {
		return u.p.Rootfs.Apply(ctx, c.ID, rec.GetSnapshotter(), changes)
	})
	if err != nil {
		return fmt.Errorf("restore root file system: %w", err)
	}
	err = checkpoint.TakeVolumes(from, name, filepath.Clean(u.volumeDir(c.ID)))
	if err != nil {
		return fmt.Errorf("restore volumes: %w", err)
	}
	next := proto.CloneOf(rec)
	next.RestorePath = filepath.Join(u.p.ContainerDir, c.ID, "restore")
	err = checkpoint.TakeImages(ctx, from, name, next.GetRestorePath())
	if err != nil {
		return fmt.Errorf("restore processes: %w", err)
	}
	c.Show(next)
	return nil
}
