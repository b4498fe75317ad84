package task

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// drainTime is how long the end of a container waits for its last output, so that who
	// sees it EXITED finds the log complete. What comes later is still written.
	drainTime = 2 * time.Second
	// deletionTime is how long the end of a shim waits for the deletion of ended tasks.
	deletionTime = 3 * time.Second
	// deleteTime bounds one attempt to delete an ended task.
	deleteTime = 30 * time.Second
	// againTime is the pause between two looks at a task that must go.
	againTime = 500 * time.Millisecond
)

// followExit waits for the end of a container's first process and deals with it. Each
// container has its own follower, so that a slow end delays nobody else's.
func (d *Driver) followExit(c *table.Container) {
	d.p.Work.Go(func(ctx context.Context) {
		exit, err := d.p.Tasks.Wait(ctx, c.Sandbox.ID, c.ID, "")
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			if !errdefs.IsNotFound(err) {
				d.p.Log.WarnContext(ctx, "end of a container is not known", slog.String("container_id", c.ID), slog.Any("error", err))
			}
			exit = pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}
			// Who is shown as ended must not run on.
			err := d.p.Tasks.Clear(ctx, c.Sandbox.Handler, c.ID, c.Record().GetCgroupsPath())
			if err != nil {
				d.p.Log.WarnContext(ctx, "rests of a lost container remain", slog.String("container_id", c.ID), slog.Any("error", err))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-c.Started():
		}
		if c.Record().GetState() == table.ContainerRunning {
			d.endContainer(ctx, c, exit)
		}
	})
}

// endContainer records an end, then deletes the task: record and TaskExit in one
// transaction, TaskDelete after the deletion. Each step is repeated until it succeeds.
func (d *Driver) endContainer(ctx context.Context, c *table.Container, exit pod.Exit) {
	// Who was killed by us did not die of what a child of it may have died of before. A kill
	// that comes while the output is drained comes too late to be the cause.
	killed := c.Killed.Load()
	drain, cancel := context.WithTimeout(ctx, drainTime)
	err := d.p.IO.Drain(drain, c.ID)
	cancel()
	if err != nil && ctx.Err() == nil {
		d.p.Log.DebugContext(ctx, "output is still open after the end", slog.String("container_id", c.ID), slog.Any("error", err))
	}
	oom := !killed && (c.OOM.Load() || d.p.Cgroups.OOMKills(c.Record().GetCgroupsPath()) > 0)
	ok := d.p.Work.Insist(ctx, "record end", slog.String("container_id", c.ID), func(ctx context.Context) error {
		return d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			setExit(r, exit, oom)
			return exitEvents(ctx, r, c.OOM.Load())
		})
	})
	if !ok {
		return
	}
	defer c.NoteDeleting()()
	c.NoteExited()
	if d.p.Ended != nil {
		d.p.Ended(c.Record().GetReason())
	}
	d.p.Log.InfoContext(ctx, "container ended", slog.String("container_id", c.ID), slog.Int("exit_code", int(exit.Code)))
	d.deleteTask(ctx, c)
}

// AwaitDeletions waits, no longer than deletionTime, until the tasks of a sandbox's ended
// containers are deleted, so that its shim has nothing left and ends in order.
func (d *Driver) AwaitDeletions(ctx context.Context, sandboxID string) {
	ctx, cancel := context.WithTimeout(ctx, deletionTime)
	defer cancel()
	for _, c := range d.p.Table.ContainersOf(sandboxID) {
		deleted := c.Deleted()
		if deleted == nil {
			continue
		}
		select {
		case <-deleted:
		case <-ctx.Done():
			return
		}
	}
}

func exitEvents(ctx context.Context, r *recordv1.Container, told bool) ([]*recordv1.Event, error) {
	var evs []*recordv1.Event
	if r.GetReason() == pod.ReasonOOMKilled && !told {
		oom, err := event.TaskOOM(ctx, r, true)
		if err != nil {
			return nil, err
		}
		evs = append(evs, oom)
	}
	exit, err := event.TaskExit(ctx, r)
	return append(evs, exit), err
}

// setExit writes an end into a record. The end is never before the start, whatever the
// clock did in between.
func setExit(r *recordv1.Container, exit pod.Exit, oom bool) {
	at := exit.At
	if at.IsZero() {
		at = time.Now()
	}
	r.State = table.ContainerExited
	r.FinishedAt = notBefore(notBefore(timestamppb.New(at), r.GetCreatedAt()), r.GetStartedAt())
	r.ExitCode = int32(exit.Code)
	switch {
	case oom && exit.Code == 137:
		r.Reason = pod.ReasonOOMKilled
	case exit.Code == 0:
		r.Reason = pod.ReasonCompleted
	case exit.Unknown:
		r.Reason = pod.ReasonUnknown
	default:
		r.Reason = pod.ReasonError
	}
}

// notBefore is the later of two times; the second may be absent. A clock that was set back
// must not make an object end before it began.
func notBefore(at, earliest *timestamppb.Timestamp) *timestamppb.Timestamp {
	if earliest != nil && at.AsTime().Before(earliest.AsTime()) {
		return earliest
	}
	return at
}

// deleteTask deletes the task of an ended container and publishes TaskDelete.
func (d *Driver) deleteTask(ctx context.Context, c *table.Container) {
	ok := d.p.Work.Insist(ctx, "delete task", slog.String("container_id", c.ID), func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, deleteTime)
		defer cancel()
		_, err := d.p.Tasks.Delete(ctx, c.Sandbox.ID, c.ID, "")
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
	if !ok {
		return
	}
	d.p.Work.Insist(ctx, "record deletion", slog.String("container_id", c.ID), func(ctx context.Context) error {
		err := d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			if _, err := d.p.Table.Container(c.ID); err != nil {
				return nil, err // removed meanwhile, with its TaskDelete
			}
			r.TaskDeleted = true
			ev, err := event.TaskDelete(ctx, r)
			return []*recordv1.Event{ev}, err
		})
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
}

// errNotRunning says that what a hint tells of cannot be.
var errNotRunning = errors.New("the container does not run")

// HintOOM notes that the kernel killed a process of a running container for lack of memory, and
// publishes TaskOOM with the first such hint. A shim that watches a group of the first hierarchy is
// told of the group's removal in the same way, so that a hint after the container's end says
// nothing; what the end itself was due to is counted by the kernel.
func (d *Driver) HintOOM(ctx context.Context, containerID string) {
	c, err := d.p.Table.Container(containerID)
	if err != nil {
		return
	}
	err = d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		if r.GetState() != table.ContainerRunning || !c.OOM.CompareAndSwap(false, true) {
			return nil, errNotRunning
		}
		ev, err := event.TaskOOM(ctx, r, false)
		return []*recordv1.Event{ev}, err
	})
	if err != nil && !errors.Is(err, errNotRunning) {
		d.p.Log.WarnContext(ctx, "event is lost", slog.String("container_id", c.ID), slog.Any("error", err))
	}
}
