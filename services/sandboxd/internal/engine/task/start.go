package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Create makes the task of a CREATED container; its process waits for Start, which does the
// same if Create was not called. If it fails the container is EXITED as after a failed start.
func (d *Driver) Create(ctx context.Context, id string) error {
	c, done, err := d.startable(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	_, err = d.create(ctx, c)
	if err != nil {
		work.Undo(ctx, func(ctx context.Context) { d.failStart(ctx, c, err) })
	}
	return err
}

// Refuse ends a start that somebody does not allow: the container is EXITED with a start error
// of that cause.
func (d *Driver) Refuse(ctx context.Context, id string, cause error) error {
	c, done, err := d.startable(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	d.failStart(ctx, c, cause)
	return nil
}

// startable takes the turn of a container that can be started.
func (d *Driver) startable(ctx context.Context, id string) (c *table.Container, done func(), err error) {
	err = d.p.Table.Ready()
	if err != nil {
		return nil, nil, err
	}
	c, err = d.p.Table.Container(id)
	if err != nil {
		return nil, nil, err
	}
	done, err = c.Turn.Take(ctx)
	if err != nil {
		return nil, nil, err
	}
	switch rec := c.Record(); {
	case rec.GetState() == table.ContainerPreparing:
		err = fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	case rec.GetState() != table.ContainerCreated:
		err = fmt.Errorf("container %q is %s, not created: %w", id, table.StateName(rec.GetState()), errdefs.ErrFailedPrecondition)
	case c.Sandbox.Record().GetState() != table.SandboxReady || c.Sandbox.Record().GetExitedAt() != nil:
		err = fmt.Errorf("sandbox %q is not ready: %w", c.Sandbox.ID, errdefs.ErrFailedPrecondition)
	default:
		return c, done, nil
	}
	done()
	return nil, nil, err
}

// Start runs a CREATED container. If that fails the container is EXITED with a
// start error, and the error carries what the runtime said.
func (d *Driver) Start(ctx context.Context, id string) error {
	c, done, err := d.startable(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	pid, err := d.run(ctx, c)
	if err == nil {
		err = d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			r.State = table.ContainerRunning
			r.Pid = pid
			r.StartedAt = notBefore(timestamppb.Now(), r.GetCreatedAt())
			r.BootId = d.p.BootID
			return event.TaskStart(ctx, r)
		})
	}
	if err != nil {
		work.Undo(ctx, func(ctx context.Context) { d.failStart(ctx, c, err) })
		return err
	}
	c.Waiting.Store(nil)
	c.NoteStarted()
	d.dropRestored(ctx, c)
	return nil
}

// dropRestored removes the state that a container was restored from; nothing needs it once
// the processes run.
func (d *Driver) dropRestored(ctx context.Context, c *table.Container) {
	path := c.Record().GetRestorePath()
	if path == "" {
		return
	}
	err := os.RemoveAll(path)
	if err != nil {
		d.p.Log.WarnContext(ctx, "checkpoint data remains until its container is removed", slog.String("container_id", c.ID), slog.Any("error", err))
	}
}

// create makes the task, unless it waits already, and returns its process.
func (d *Driver) create(ctx context.Context, c *table.Container) (uint32, error) {
	if pid := c.Waiting.Load(); pid != nil {
		return *pid, nil
	}
	rec := c.Record()
	spec, err := c.Spec()
	if err != nil {
		return 0, err
	}
	err = d.makeVolumes(ctx, rec, spec)
	if err != nil {
		return 0, err
	}
	stdio, err := d.p.IO.Open(ctx, c.ID, ioSpec(c))
	if err != nil {
		return 0, err
	}
	mounts, err := d.p.Rootfs.Mounts(ctx, c.ID, rec.GetSnapshotter())
	if err != nil {
		return 0, err
	}
	pid, err := d.createTask(ctx, port.TaskSpec{
		SandboxID: c.Sandbox.ID, ContainerID: c.ID, Handler: c.Sandbox.Handler,
		Spec: rec.GetSpec(), Rootfs: mounts, Stdio: stdio, Checkpoint: rec.GetRestorePath(),
	})
	if err != nil {
		return 0, err
	}
	if rec.GetRestorePath() == "" { // what is restored has no process yet
		err = d.p.Programs.Check(c.ID, pid, spec.Process)
	}
	if err != nil {
		return 0, running(rec, err)
	}
	c.Waiting.Store(&pid)
	return pid, nil
}

// running is an error of the container's command.
func running(rec *recordv1.Container, err error) error {
	cfg := rec.GetConfig()
	return fmt.Errorf("run %q: %w", strings.Join(command(cfg.GetCommand(), cfg.GetArgs()), " "), err)
}

// run creates and starts the task. The wait for its end begins before the start, so that
// no end is missed.
func (d *Driver) run(ctx context.Context, c *table.Container) (uint32, error) {
	pid, err := d.create(ctx, c)
	if err != nil {
		return 0, err
	}
	d.followExit(c)
	ctx, span := d.p.Tracer.Start(ctx, "sandboxd.start_task")
	defer span.End()
	started, err := d.p.Tasks.Start(ctx, c.Sandbox.ID, c.ID, "")
	if err != nil {
		return 0, running(c.Record(), err)
	}
	if started != 0 {
		pid = started
	}
	return pid, nil
}

func (d *Driver) createTask(ctx context.Context, spec port.TaskSpec) (uint32, error) {
	ctx, span := d.p.Tracer.Start(ctx, "sandboxd.create_task")
	defer span.End()
	return d.p.Tasks.Create(ctx, spec)
}

func command(cmd, args []string) []string {
	return append(append([]string{}, cmd...), args...)
}

func ioSpec(c *table.Container) port.IOSpec {
	rec := c.Record()
	cfg := rec.GetConfig()
	return port.IOSpec{
		SandboxID: rec.GetSandboxId(), LogDir: c.Sandbox.Record().GetConfig().GetLogDirectory(), LogPath: rec.GetLogPath(),
		Terminal: cfg.GetTty(), Stdin: cfg.GetStdin(), StdinOnce: cfg.GetStdinOnce(),
	}
}

// makeVolumes makes the folders of the volumes that the image declares, with what the image
// has in their place.
func (d *Driver) makeVolumes(ctx context.Context, rec *recordv1.Container, spec *specs.Spec) error {
	prefix := filepath.Join(d.p.ContainerDir, rec.GetId()) + string(filepath.Separator)
	folders := map[string]string{}
	for _, m := range spec.Mounts {
		if strings.HasPrefix(m.Source, prefix) {
			folders[m.Destination] = m.Source
		}
	}
	return d.p.Rootfs.FillVolumes(ctx, rec.GetId(), rec.GetSnapshotter(), folders)
}

// failStart records a start that failed and removes what it left.
func (d *Driver) failStart(ctx context.Context, c *table.Container, cause error) {
	deleted := d.deleteFailed(ctx, c)
	c.Waiting.Store(nil)
	err := d.p.IO.Close(ctx, c.ID)
	if err != nil {
		d.p.Log.WarnContext(ctx, "streams of a failed start remain", slog.String("container_id", c.ID), slog.Any("error", err))
	}
	err = d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		now := timestamppb.Now()
		r.State = table.ContainerExited
		r.StartedAt, r.FinishedAt = notBefore(now, r.GetCreatedAt()), notBefore(now, r.GetCreatedAt())
		r.ExitCode, r.Reason, r.Message = pod.ExitCodeStartError, pod.ReasonStartError, cause.Error()
		r.TaskDeleted = deleted
		ev, err := event.TaskExit(ctx, r)
		return []*recordv1.Event{ev}, err
	})
	if err != nil {
		d.p.Log.ErrorContext(ctx, "failed start cannot be recorded", slog.String("container_id", c.ID), slog.Any("error", err))
	}
	c.NoteExited()
	c.NoteStarted()
	if !deleted {
		d.p.Work.Go(func(ctx context.Context) { d.deleteFailedLater(ctx, c) })
	}
}

// deleteFailedLater deletes the task of a failed start as soon as that works. Nobody was
// told of the task, so nobody is told of its deletion.
func (d *Driver) deleteFailedLater(ctx context.Context, c *table.Container) {
	d.p.Work.Insist(ctx, "task of a failed start cannot be deleted", slog.String("container_id", c.ID), func(ctx context.Context) error {
		err := d.endTask(ctx, c)
		if err != nil {
			return err
		}
		err = d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			if _, err := d.p.Table.Container(c.ID); err != nil {
				return nil, err // removed meanwhile, with its task
			}
			r.TaskDeleted = true
			return nil, nil
		})
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
}

// deleteFailed deletes the task of a failed start and says whether that worked.
func (d *Driver) deleteFailed(ctx context.Context, c *table.Container) bool {
	err := d.endTask(ctx, c)
	if err != nil {
		d.p.Log.WarnContext(ctx, "task of a failed start is deleted later", slog.String("container_id", c.ID), slog.Any("error", err))
	}
	return err == nil
}

// endTask deletes a task that nobody may see, whatever it is doing: a start whose answer
// came too late may have been one that worked.
func (d *Driver) endTask(ctx context.Context, c *table.Container) error {
	ctx, cancel := context.WithTimeout(ctx, deleteTime)
	defer cancel()
	err := d.p.Tasks.Kill(ctx, c.Sandbox.ID, c.ID, "", syscall.SIGKILL, true)
	if err == nil {
		_, err = d.p.Tasks.Wait(ctx, c.Sandbox.ID, c.ID, "")
	}
	// A process that has ended cannot be killed, and its deletion is what matters.
	_, deleteErr := d.p.Tasks.Delete(ctx, c.Sandbox.ID, c.ID, "")
	if deleteErr == nil || errdefs.IsNotFound(deleteErr) {
		return nil
	}
	return errors.Join(err, deleteErr)
}
