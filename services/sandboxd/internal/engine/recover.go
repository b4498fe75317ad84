package engine

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Recover brings the records back to life. It never fails because of one object: what
// cannot be brought back is shown as ended, so that kubelet removes it. load lets the
// controller find its shims again and returns their sandboxes; it is called when MadeWith
// answers. Lists answer only after the records are complete.
func (e *Engine) Recover(ctx context.Context, load func(ctx context.Context) (sandboxes []string, err error)) error {
	snap, err := e.table.Load()
	if err != nil {
		return err
	}
	for bucket, keys := range snap.Broken {
		e.log.ErrorContext(ctx, "records cannot be read and are left alone", slog.String("bucket", bucket), slog.Any("keys", keys))
	}
	e.fill(ctx, snap)
	shims, err := load(ctx)
	if err != nil {
		return err
	}
	g := new(errgroup.Group)
	g.SetLimit(16)
	for _, s := range e.table.Sandboxes() {
		g.Go(func() error {
			e.Sandboxes.Recover(ctx, s)
			return nil
		})
	}
	err = g.Wait()
	if err != nil {
		return err
	}
	e.table.SetComplete()
	for _, r := range snap.Releases {
		e.Sandboxes.OweRelease(r)
	}
	e.Capture.Recover(ctx)
	e.removeOrphans(ctx, shims)
	e.log.InfoContext(ctx, "state recovered", slog.Int("sandboxes", len(snap.Sandboxes)), slog.Int("containers", len(snap.Containers)))
	return nil
}

// fill enters all records, with what is known of their sandboxes besides.
func (e *Engine) fill(ctx context.Context, snap store.Snapshot) {
	for _, id := range e.table.Fill(snap) {
		e.log.WarnContext(ctx, "two sandboxes have one name, which the younger keeps", slog.String("sandbox_id", id))
	}
	for _, s := range e.table.Sandboxes() {
		if err := e.p.Specs.KeepLabel(s.Record().GetSelinuxLabel()); err != nil {
			e.log.WarnContext(ctx, "another pod may get the same label", slog.String("sandbox_id", s.ID), slog.Any("error", err))
		}
		s.Handler, _ = e.cfg.Handler(s.Record().GetRuntimeHandler()) // a handler that is gone matters only to new containers
		s.Files = e.p.Files.Paths(s.ID, s.Record().GetConfig())
	}
}

// MadeWith returns the handler that a sandbox was made with and the boot of the machine in which
// it was, as its record tells; false for a sandbox without a record, or whose handler is not
// configured any more.
func (e *Engine) MadeWith(sandboxID string) (h pod.Handler, bootID string, ok bool) {
	s, err := e.table.Sandbox(sandboxID)
	if err != nil || s.Handler.Name == "" {
		return pod.Handler{}, "", false
	}
	return s.Handler, s.Record().GetBootId(), true
}

// removeOrphans removes what no record names: root file systems and folders of containers
// that were never committed, shims and namespaces whose record is lost.
func (e *Engine) removeOrphans(ctx context.Context, shims []string) {
	for _, id := range shims {
		if _, err := e.table.Sandbox(id); err != nil {
			e.logOrphan(ctx, "shim", id, e.p.Controller.Shutdown(ctx, id))
		}
	}
	pins, err := e.p.Namespaces.List()
	if err != nil {
		e.log.WarnContext(ctx, "namespaces cannot be listed", slog.Any("error", err))
	}
	for _, id := range pins {
		if _, err := e.table.Sandbox(id); err != nil {
			e.logOrphan(ctx, "namespaces", id, e.p.Namespaces.Unpin(ctx, id))
		}
	}
	keys, err := e.p.Rootfs.Keys(ctx)
	if err != nil {
		e.log.WarnContext(ctx, "root file systems cannot be listed", slog.Any("error", err))
	}
	for snapshotter, list := range keys {
		for _, key := range list {
			if _, err := e.table.Container(key); err == nil {
				continue
			}
			err := e.p.Rootfs.Remove(ctx, key, snapshotter)
			e.logOrphan(ctx, "root file system", key, err)
		}
	}
	e.releaseOrphanedImages(ctx)
	entries, err := os.ReadDir(e.cfg.ContainerDir)
	if err != nil && !os.IsNotExist(err) {
		e.log.WarnContext(ctx, "container folders cannot be listed", slog.Any("error", err))
	}
	for _, entry := range entries {
		if _, err := e.table.Container(entry.Name()); err == nil {
			continue
		}
		err := os.RemoveAll(filepath.Join(e.cfg.ContainerDir, entry.Name()))
		e.logOrphan(ctx, "folder", entry.Name(), err)
	}
}

func (e *Engine) logOrphan(ctx context.Context, what, id string, err error) {
	if err != nil {
		e.log.WarnContext(ctx, "orphan cannot be removed", slog.String("kind", what), slog.String("id", id), slog.Any("error", err))
		return
	}
	e.log.InfoContext(ctx, "orphan removed", slog.String("kind", what), slog.String("id", id))
}

// releaseOrphanedImages releases the image volumes of containers that no record names.
func (e *Engine) releaseOrphanedImages(ctx context.Context) {
	holders, err := e.p.ImageVolumes.Holders()
	if err != nil {
		e.log.WarnContext(ctx, "image volumes cannot be listed", slog.Any("error", err))
	}
	for sandboxID, containers := range holders {
		var errs []error
		s, err := e.table.Sandbox(sandboxID)
		if err != nil || s.Record().GetState() == table.SandboxStopped {
			e.logOrphan(ctx, "image volumes", sandboxID, e.p.ImageVolumes.Release(ctx, sandboxID, ""))
			continue
		}
		if len(containers) == 0 { // a container that is made right now may take them
			errs = append(errs, e.p.ImageVolumes.Release(ctx, sandboxID, sandboxID))
		}
		for _, id := range containers {
			if _, err := e.table.Container(id); err != nil {
				errs = append(errs, e.p.ImageVolumes.Release(ctx, sandboxID, id))
			}
		}
		if len(errs) > 0 {
			e.logOrphan(ctx, "image volumes", sandboxID, errors.Join(errs...))
		}
	}
}
