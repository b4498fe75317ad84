package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// StartContainer runs a CREATED container. If that fails the container is EXITED with a
// start error, and the error carries what the runtime said.
func (e *Engine) StartContainer(ctx context.Context, id string) error {
	err := e.ready()
	if err != nil {
		return err
	}
	c, err := e.container(id)
	if err != nil {
		return err
	}
	done, err := c.turn.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	switch rec := c.rec.Load(); {
	case rec.GetState() == containerPreparing:
		return fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	case rec.GetState() != containerCreated:
		return fmt.Errorf("container %q is %s, not created: %w", id, stateName(rec.GetState()), errdefs.ErrFailedPrecondition)
	case c.sandbox.rec.Load().GetState() != sandboxReady || c.sandbox.rec.Load().GetExitedAt() != nil:
		return fmt.Errorf("sandbox %q is not ready: %w", c.sandbox.id, errdefs.ErrFailedPrecondition)
	}
	pid, err := e.run(ctx, c)
	if err == nil {
		err = e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			r.State = containerRunning
			r.Pid = pid
			r.StartedAt = notBefore(timestamp(time.Now()), r.GetCreatedAt())
			r.BootId = e.cfg.BootID
			return startEvents(ctx, r)
		})
	}
	if err != nil {
		undo(ctx, func(ctx context.Context) { e.failStart(ctx, c, err) })
		return err
	}
	close(c.started)
	return nil
}

// run creates and starts the task. The wait for its end begins before the start, so that
// no end is missed.
func (e *Engine) run(ctx context.Context, c *container) (uint32, error) {
	rec := c.rec.Load()
	cfg := rec.GetConfig()
	spec, err := c.specOf()
	if err != nil {
		return 0, err
	}
	err = e.makeVolumes(ctx, rec, spec)
	if err != nil {
		return 0, err
	}
	if rec.GetLogPath() != "" {
		// kubelet makes this folder; other callers of CRI expect that the runtime does.
		err = os.MkdirAll(filepath.Dir(rec.GetLogPath()), 0o755)
		if err != nil {
			return 0, fmt.Errorf("log folder: %w", err)
		}
	}
	stdio, err := e.p.IO.Open(ctx, c.id, ioSpec(rec))
	if err != nil {
		return 0, err
	}
	mounts, err := e.p.Rootfs.Mounts(ctx, c.id, rec.GetSnapshotter())
	if err != nil {
		return 0, err
	}
	pid, err := e.createTask(ctx, TaskSpec{
		SandboxID: c.sandbox.id, ContainerID: c.id, Handler: c.sandbox.handler,
		Spec: rec.GetSpec(), Rootfs: mounts, Stdio: stdio,
	})
	if err != nil {
		return 0, err
	}
	err = e.p.Programs.Check(c.id, pid, spec.Process)
	if err != nil {
		return 0, fmt.Errorf("run %q: %w", strings.Join(command(cfg.GetCommand(), cfg.GetArgs()), " "), err)
	}
	e.followExit(c)
	ctx, span := e.tracer.Start(ctx, "sandboxd.start_task")
	defer span.End()
	started, err := e.p.Tasks.Start(ctx, c.sandbox.id, c.id, "")
	if err != nil {
		return 0, fmt.Errorf("run %q: %w", strings.Join(command(cfg.GetCommand(), cfg.GetArgs()), " "), err)
	}
	if started != 0 {
		pid = started
	}
	return pid, nil
}

func (e *Engine) createTask(ctx context.Context, spec TaskSpec) (uint32, error) {
	ctx, span := e.tracer.Start(ctx, "sandboxd.create_task")
	defer span.End()
	return e.p.Tasks.Create(ctx, spec)
}

func command(cmd, args []string) []string {
	return append(append([]string{}, cmd...), args...)
}

func ioSpec(rec *recordv1.Container) IOSpec {
	cfg := rec.GetConfig()
	return IOSpec{SandboxID: rec.GetSandboxId(), LogPath: rec.GetLogPath(), Terminal: cfg.GetTty(), Stdin: cfg.GetStdin(), StdinOnce: cfg.GetStdinOnce()}
}

// makeVolumes makes the folders of the volumes that the image declares, with what the image
// has in their place.
func (e *Engine) makeVolumes(ctx context.Context, rec *recordv1.Container, spec *specs.Spec) error {
	prefix := e.volumeDir(rec.GetId())
	folders := map[string]string{}
	for _, m := range spec.Mounts {
		if strings.HasPrefix(m.Source, prefix) {
			folders[m.Destination] = m.Source
		}
	}
	return e.p.Rootfs.FillVolumes(ctx, rec.GetId(), rec.GetSnapshotter(), folders)
}

// failStart records a start that failed and removes what it left.
func (e *Engine) failStart(ctx context.Context, c *container, cause error) {
	deleted := e.deleteFailed(ctx, c)
	err := e.p.IO.Close(ctx, c.id)
	if err != nil {
		e.log.WarnContext(ctx, "streams of a failed start remain", slog.String("container_id", c.id), slog.Any("error", err))
	}
	err = e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		now := timestamp(time.Now())
		r.State = containerExited
		r.StartedAt, r.FinishedAt = notBefore(now, r.GetCreatedAt()), notBefore(now, r.GetCreatedAt())
		r.ExitCode, r.Reason, r.Message = pod.ExitCodeStartError, pod.ReasonStartError, cause.Error()
		r.TaskDeleted = deleted
		ev, err := exitEvent(ctx, r)
		return []*recordv1.Event{ev}, err
	})
	if err != nil {
		e.log.ErrorContext(ctx, "failed start cannot be recorded", slog.String("container_id", c.id), slog.Any("error", err))
	}
	closeOnce(c.exited)
	closeOnce(c.started)
	if !deleted {
		e.background(func(ctx context.Context) { e.deleteFailedLater(ctx, c) })
	}
}

// deleteFailedLater deletes the task of a failed start as soon as that works. Nobody was
// told of the task, so nobody is told of its deletion.
func (e *Engine) deleteFailedLater(ctx context.Context, c *container) {
	e.insist(ctx, "task of a failed start cannot be deleted", c.id, func(ctx context.Context) error {
		err := e.endTask(ctx, c)
		if err != nil {
			return err
		}
		err = e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			if _, err := e.container(c.id); err != nil {
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
func (e *Engine) deleteFailed(ctx context.Context, c *container) bool {
	err := e.endTask(ctx, c)
	if err != nil {
		e.log.WarnContext(ctx, "task of a failed start is deleted later", slog.String("container_id", c.id), slog.Any("error", err))
	}
	return err == nil
}

// endTask deletes a task that nobody may see, whatever it is doing: a start whose answer
// came too late may have been one that worked.
func (e *Engine) endTask(ctx context.Context, c *container) error {
	ctx, cancel := context.WithTimeout(ctx, deleteTime)
	defer cancel()
	err := e.p.Tasks.Kill(ctx, c.sandbox.id, c.id, "", syscall.SIGKILL, true)
	if err == nil {
		_, err = e.p.Tasks.Wait(ctx, c.sandbox.id, c.id, "")
	}
	// A process that has ended cannot be killed, and its deletion is what matters.
	_, deleteErr := e.p.Tasks.Delete(ctx, c.sandbox.id, c.id, "")
	if deleteErr == nil || errdefs.IsNotFound(deleteErr) {
		return nil
	}
	return errors.Join(err, deleteErr)
}

// closeOnce closes a channel that only operations with the object's turn close.
func closeOnce(ch chan struct{}) {
	select {
	case <-ch:
	default:
		close(ch)
	}
}

func stateName(s recordv1.ContainerState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "CONTAINER_STATE_"))
}
