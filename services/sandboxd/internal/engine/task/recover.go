package task

import (
	"context"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Recover brings one container up to date after a restart of the process, or of the node.
func (d *Driver) Recover(ctx context.Context, c *table.Container, rebooted bool) {
	rec := c.Record()
	switch {
	case rec.GetState() == table.ContainerCreated && !rebooted:
		d.recoverStart(ctx, c)
	case rec.GetState() == table.ContainerCreated:
		d.discardAtReboot(ctx, c)
	case rec.GetState() == table.ContainerRunning && rebooted:
		c.NoteStarted()
		d.endAtReboot(ctx, c)
	case rec.GetState() == table.ContainerRunning:
		c.NoteStarted()
		d.resume(ctx, c)
	case rec.GetState() == table.ContainerExited:
		c.NoteStarted()
		c.NoteExited()
		if rec.GetTaskDeleted() {
			return
		}
		if rec.GetPid() == 0 {
			d.p.Work.Go(func(ctx context.Context) { d.deleteFailedLater(ctx, c) })
			return
		}
		d.p.Work.Go(func(ctx context.Context) { d.deleteTask(ctx, c) })
	}
}

// resume connects the streams of a running container again and follows it.
func (d *Driver) resume(ctx context.Context, c *table.Container) {
	spec := ioSpec(c)
	spec.Running = true
	_, err := d.p.IO.Open(ctx, c.ID, spec)
	if err != nil {
		d.p.Log.WarnContext(ctx, "streams of a running container cannot be opened", slog.String("container_id", c.ID), slog.Any("error", err))
	}
	d.followExit(c)
}

// recoverStart deals with a start that was under way when the process died: a task that
// runs is taken over, one that does not is deleted and the container can be started again.
func (d *Driver) recoverStart(ctx context.Context, c *table.Container) {
	st, err := d.p.Tasks.State(ctx, c.Sandbox.ID, c.ID, "")
	if err != nil && !errdefs.IsNotFound(err) {
		return // the shim does not answer: what there is of a task ends with it
	}
	// A task that the shim does not know may still have a bundle, which would be in the way
	// of the next start: the deletion removes that too.
	if err == nil && (st.Status == "running" || st.Status == "stopped") {
		err = d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			r.State, r.Pid, r.BootId = table.ContainerRunning, st.Pid, d.p.BootID
			r.StartedAt = notBefore(timestamppb.Now(), r.GetCreatedAt())
			return event.TaskStart(ctx, r)
		})
		if err == nil {
			c.NoteStarted()
			d.resume(ctx, c)
			return
		}
	}
	done, err := c.Turn.Take(ctx) // the next start waits
	if err != nil {
		return
	}
	d.p.Work.Go(func(ctx context.Context) {
		defer done()
		d.dropHalfStarted(ctx, c)
	})
}

// dropHalfStarted deletes what there is of a task that never ran until nothing is left. The
// shim may still be at the creation that it was asked for, so one look is not enough.
func (d *Driver) dropHalfStarted(ctx context.Context, c *table.Container) {
	for {
		_, err := d.p.Tasks.Delete(ctx, c.Sandbox.ID, c.ID, "")
		if errdefs.IsNotFound(err) {
			return
		}
		if err != nil {
			d.p.Log.WarnContext(ctx, "half-started task remains", slog.String("container_id", c.ID), slog.Any("error", err))
			return
		}
		if !pause.For(ctx, againTime) {
			return
		}
	}
}

// discardAtReboot shows a container that was never started as ended: nothing of what was
// made for it is left to start.
func (d *Driver) discardAtReboot(ctx context.Context, c *table.Container) {
	end := func(r *recordv1.Container) {
		setExit(r, pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}, false)
		r.Message = "the node was restarted before the container was started"
		r.TaskDeleted = true
	}
	err := d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		end(r)
		return nil, nil
	})
	if err != nil {
		d.p.Log.WarnContext(ctx, "end at reboot cannot be recorded", slog.String("container_id", c.ID), slog.Any("error", err))
		next := proto.CloneOf(c.Record())
		end(next)
		c.Show(next)
	}
	c.NoteStarted()
	c.NoteExited()
}

// endAtReboot records the end of a container that the node took down with it.
func (d *Driver) endAtReboot(ctx context.Context, c *table.Container) {
	err := d.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		setExit(r, pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}, false)
		r.Message = "the node was restarted while the container ran"
		r.TaskDeleted = true
		exit, err := event.TaskExit(ctx, r)
		if err != nil {
			return nil, err
		}
		del, err := event.TaskDelete(ctx, r)
		return []*recordv1.Event{exit, del}, err
	})
	if err != nil {
		d.p.Log.WarnContext(ctx, "end at reboot cannot be recorded", slog.String("container_id", c.ID), slog.Any("error", err))
		next := proto.CloneOf(c.Record())
		setExit(next, pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}, false)
		c.Show(next)
	}
	c.NoteExited()
}
