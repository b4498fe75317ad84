package engine

import (
	"context"
	"log/slog"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
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

	retryFirst = 500 * time.Millisecond
	retryMost  = time.Minute
)

// followExit waits for the end of a container's first process and deals with it. Each
// container has its own follower, so that a slow end delays nobody else's.
func (e *Engine) followExit(c *container) {
	e.background(func(ctx context.Context) {
		exit, err := e.p.Tasks.Wait(ctx, c.sandbox.id, c.id, "")
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			if !errdefs.IsNotFound(err) {
				e.log.WarnContext(ctx, "end of a container is not known", slog.String("container_id", c.id), slog.Any("error", err))
			}
			exit = pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}
			// Who is shown as ended must not run on.
			err := e.p.Cgroups.Clear(ctx, c.id, c.rec.Load().GetCgroupsPath())
			if err != nil {
				e.log.WarnContext(ctx, "cgroup of a lost container is not cleared", slog.String("container_id", c.id), slog.Any("error", err))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-c.started:
		}
		if c.rec.Load().GetState() == containerRunning {
			e.endContainer(ctx, c, exit)
		}
	})
}

// endContainer records an end, then deletes the task: record and TaskExit in one
// transaction, TaskDelete after the deletion. Each step is repeated until it succeeds.
func (e *Engine) endContainer(ctx context.Context, c *container, exit pod.Exit) {
	drain, cancel := context.WithTimeout(ctx, drainTime)
	err := e.p.IO.Drain(drain, c.id)
	cancel()
	if err != nil && ctx.Err() == nil {
		e.log.DebugContext(ctx, "output is still open after the end", slog.String("container_id", c.id), slog.Any("error", err))
	}
	oom := c.oom.Load() || e.p.Cgroups.OOMKills(c.rec.Load().GetCgroupsPath()) > 0
	ok := e.insist(ctx, "record end", c.id, func(ctx context.Context) error {
		return e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			setExit(r, exit, oom)
			return exitEvents(ctx, r, c.oom.Load())
		})
	})
	if !ok {
		return
	}
	deleted := make(chan struct{})
	defer close(deleted)
	c.deleting.Store(&deleted)
	closeOnce(c.exited)
	e.log.InfoContext(ctx, "container ended", slog.String("container_id", c.id), slog.Int("exit_code", int(exit.Code)))
	e.deleteTask(ctx, c)
}

// awaitDeletions waits, no longer than deletionTime, until the tasks of a sandbox's ended
// containers are deleted, so that its shim has nothing left and ends in order.
func (e *Engine) awaitDeletions(ctx context.Context, sandboxID string) {
	ctx, cancel := context.WithTimeout(ctx, deletionTime)
	defer cancel()
	for _, c := range e.containersOf(sandboxID) {
		deleted := c.deleting.Load()
		if deleted == nil {
			continue
		}
		select {
		case <-*deleted:
		case <-ctx.Done():
			return
		}
	}
}

func exitEvents(ctx context.Context, r *recordv1.Container, told bool) ([]*recordv1.Event, error) {
	var evs []*recordv1.Event
	if r.GetReason() == pod.ReasonOOMKilled && !told {
		oom, err := event(ctx, TopicTaskOOM, messageID("oom", r.GetId(), r.GetPid()), true, &events.TaskOOM{ContainerID: r.GetId()})
		if err != nil {
			return nil, err
		}
		evs = append(evs, oom)
	}
	exit, err := exitEvent(ctx, r)
	return append(evs, exit), err
}

// setExit writes an end into a record. The end is never before the start, whatever the
// clock did in between.
func setExit(r *recordv1.Container, exit pod.Exit, oom bool) {
	at := exit.At
	if at.IsZero() {
		at = time.Now()
	}
	r.State = containerExited
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
func (e *Engine) deleteTask(ctx context.Context, c *container) {
	ok := e.insist(ctx, "delete task", c.id, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, deleteTime)
		defer cancel()
		_, err := e.p.Tasks.Delete(ctx, c.sandbox.id, c.id, "")
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
	if !ok {
		return
	}
	e.insist(ctx, "record deletion", c.id, func(ctx context.Context) error {
		err := e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			if _, err := e.container(c.id); err != nil {
				return nil, err // removed meanwhile, with its TaskDelete
			}
			r.TaskDeleted = true
			ev, err := deleteEvent(ctx, r)
			return []*recordv1.Event{ev}, err
		})
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
}

// insist repeats fn with growing pauses until it succeeds; false means that ctx ended.
func (e *Engine) insist(ctx context.Context, step, id string, fn func(ctx context.Context) error) bool {
	for delay := retryFirst; ; delay = min(2*delay, retryMost) {
		err := fn(ctx)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		e.log.WarnContext(ctx, "step of a container's end failed and is repeated", slog.String("step", step),
			slog.String("container_id", id), slog.Any("error", err))
		if !pause(ctx, delay) {
			return false
		}
	}
}

// HintOOM notes that the kernel killed a process of a container for lack of memory, and
// publishes TaskOOM with the first such hint.
func (e *Engine) HintOOM(ctx context.Context, containerID string) {
	c, err := e.container(containerID)
	if err == nil && c.oom.CompareAndSwap(false, true) {
		e.publish(ctx, TopicTaskOOM, messageID("oom", c.id, c.rec.Load().GetPid()), &events.TaskOOM{ContainerID: c.id})
	}
}
