package engine

import (
	"context"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Recover brings the records back to life. It never fails because of one object: what
// cannot be brought back is shown as ended, so that kubelet removes it. The controller must
// have loaded its shims before; shims are the sandboxes that it found. Lists answer only
// after the records are complete.
func (e *Engine) Recover(ctx context.Context, shims []string) error {
	snap, err := e.p.Store.Load()
	if err != nil {
		return err
	}
	for bucket, keys := range snap.Broken {
		e.log.ErrorContext(ctx, "records cannot be read and are left alone", slog.String("bucket", bucket), slog.Any("keys", keys))
	}
	e.index(ctx, snap)
	g := new(errgroup.Group)
	g.SetLimit(16)
	for _, s := range slices.Collect(maps.Values(e.sandboxes)) {
		g.Go(func() error {
			e.recoverSandbox(ctx, s)
			return nil
		})
	}
	err = g.Wait()
	if err != nil {
		return err
	}
	close(e.recovered)
	for _, r := range snap.Releases {
		e.oweRelease(r)
	}
	e.removeOrphans(ctx, shims)
	e.log.InfoContext(ctx, "state recovered", slog.Int("sandboxes", len(snap.Sandboxes)), slog.Int("containers", len(snap.Containers)))
	return nil
}

// index enters all records. Of two objects with one name the younger keeps it; the other
// stays listed under its id.
func (e *Engine) index(ctx context.Context, snap store.Snapshot) {
	e.mu.Lock()
	defer e.mu.Unlock()
	slices.SortFunc(snap.Sandboxes, func(a, b *recordv1.Sandbox) int {
		return a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime())
	})
	for _, rec := range snap.Sandboxes {
		s := newSandbox(rec)
		s.handler, _ = e.handler(rec.GetRuntimeHandler()) // a handler that is gone matters only to new containers
		s.files = e.p.Files.Paths(s.id, rec.GetConfig())
		key := sandboxKey(rec.GetConfig().GetMetadata())
		if other, taken := e.names[key]; taken {
			e.log.WarnContext(ctx, "two sandboxes have one name", slog.String("sandbox_id", s.id), slog.String("other_id", other))
		}
		e.names[key] = s.id
		e.sandboxes[s.id] = s
	}
	slices.SortFunc(snap.Containers, func(a, b *recordv1.Container) int {
		return a.GetCreatedAt().AsTime().Compare(b.GetCreatedAt().AsTime())
	})
	for _, rec := range snap.Containers {
		s := e.sandboxes[rec.GetSandboxId()]
		if s == nil {
			// Its sandbox's record is lost or broken: it stays listed until it is removed.
			s = newSandbox(&recordv1.Sandbox{Id: rec.GetSandboxId(), State: sandboxStopped})
		}
		e.names[containerKey(rec.GetSandboxId(), rec.GetConfig().GetMetadata())] = rec.GetId()
		e.containers[rec.GetId()] = newContainer(rec, s)
	}
}

// recoverSandbox brings one sandbox and its containers up to date.
func (e *Engine) recoverSandbox(ctx context.Context, s *sandbox) {
	rec := s.rec.Load()
	if rec.GetState() == sandboxPreparing {
		// Nobody can commit it any more: sessions do not outlive this process.
		e.doomSandbox(s)
		return
	}
	rebooted := rec.GetBootId() != e.cfg.BootID
	alive := !rebooted && e.mayLive(ctx, s.id)
	if rec.GetState() == sandboxReady && !alive && (rebooted || rec.GetExitedAt() == nil) {
		e.endSandbox(ctx, s, rebooted)
	}
	for _, c := range e.containersOf(s.id) {
		e.recoverContainer(ctx, c, rebooted)
	}
	switch {
	case rebooted && s.rec.Load().GetState() != sandboxStopped:
		// Addresses of before the boot are released without waiting for kubelet.
		e.background(func(ctx context.Context) { e.stopAfterReboot(ctx, s) })
	case alive && s.rec.Load().GetState() == sandboxReady:
		e.watchSandbox(s)
	}
}

// stopAfterReboot stops a sandbox of before the reboot once the state is complete, until
// it succeeds.
func (e *Engine) stopAfterReboot(ctx context.Context, s *sandbox) {
	select {
	case <-e.recovered:
	case <-ctx.Done():
		return
	}
	for delay := retryFirst; ; delay = min(2*delay, retryMost) {
		err := e.StopSandbox(ctx, s.id)
		if err == nil {
			return
		}
		e.log.WarnContext(ctx, "sandbox of before the reboot is not stopped yet", slog.String("sandbox_id", s.id), slog.Any("error", err))
		if !pause(ctx, delay) {
			return
		}
	}
}

// mayLive says whether a sandbox lives or does not answer for now; the latter's end shows
// when it is watched.
func (e *Engine) mayLive(ctx context.Context, id string) bool {
	st, err := e.p.Controller.Status(ctx, id, false)
	if err != nil {
		return !errdefs.IsNotFound(err)
	}
	return st.Alive || st.ExitedAt.IsZero()
}

// endSandbox notes the end of a sandbox that ended unseen.
func (e *Engine) endSandbox(ctx context.Context, s *sandbox, rebooted bool) {
	end := func(r *recordv1.Sandbox) {
		if rebooted {
			r.State = sandboxStopping
		}
		if r.GetExitedAt() == nil {
			r.ExitedAt = timestamp(time.Now())
		}
	}
	ev, err := event(ctx, TopicSandboxExit, "exit-"+s.id, true,
		&events.SandboxExit{SandboxID: s.id, ExitStatus: pod.ExitCodeUnknown, ExitedAt: timestamp(time.Now())})
	if err == nil {
		err = e.saveSandbox(ctx, s, end, ev)
	}
	if err != nil {
		e.log.WarnContext(ctx, "end of a sandbox cannot be recorded", slog.String("sandbox_id", s.id), slog.Any("error", err))
		next := proto.CloneOf(s.rec.Load())
		end(next)
		s.rec.Store(next)
	}
}

func (e *Engine) abandon(ctx context.Context, s *sandbox) {
	select {
	case <-e.recovered:
	case <-ctx.Done():
		return
	}
	for delay := retryFirst; ; delay = min(2*delay, retryMost) {
		err := e.AbortSandbox(ctx, s.id)
		if err == nil {
			return
		}
		e.log.WarnContext(ctx, "half-made sandbox cannot be removed yet", slog.String("sandbox_id", s.id), slog.Any("error", err))
		if !pause(ctx, delay) {
			return
		}
	}
}

// recoverContainer brings one container up to date.
func (e *Engine) recoverContainer(ctx context.Context, c *container, rebooted bool) {
	rec := c.rec.Load()
	switch {
	case rec.GetState() == containerCreated && !rebooted:
		e.recoverStart(ctx, c)
	case rec.GetState() == containerCreated:
		e.discardAtReboot(ctx, c)
	case rec.GetState() == containerRunning && rebooted:
		closeOnce(c.started)
		e.endAtReboot(ctx, c)
	case rec.GetState() == containerRunning:
		closeOnce(c.started)
		e.resume(ctx, c)
	case rec.GetState() == containerExited:
		closeOnce(c.started)
		closeOnce(c.exited)
		if rec.GetTaskDeleted() {
			return
		}
		if rec.GetPid() == 0 {
			e.background(func(ctx context.Context) { e.deleteFailedLater(ctx, c) })
			return
		}
		e.background(func(ctx context.Context) { e.deleteTask(ctx, c) })
	}
}

// resume connects the streams of a running container again and follows it.
func (e *Engine) resume(ctx context.Context, c *container) {
	_, err := e.p.IO.Open(ctx, c.id, ioSpec(c.rec.Load()))
	if err != nil {
		e.log.WarnContext(ctx, "streams of a running container cannot be opened", slog.String("container_id", c.id), slog.Any("error", err))
	}
	e.followExit(c)
}

// recoverStart deals with a start that was under way when the process died: a task that
// runs is taken over, one that does not is deleted and the container can be started again.
func (e *Engine) recoverStart(ctx context.Context, c *container) {
	st, err := e.p.Tasks.State(ctx, c.sandbox.id, c.id, "")
	if err != nil && !errdefs.IsNotFound(err) {
		return // the shim does not answer: what there is of a task ends with it
	}
	// A task that the shim does not know may still have a bundle, which would be in the way
	// of the next start: the deletion removes that too.
	if err == nil && (st.Status == "running" || st.Status == "stopped") {
		err = e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
			r.State, r.Pid, r.BootId = containerRunning, st.Pid, e.cfg.BootID
			r.StartedAt = notBefore(timestamp(time.Now()), r.GetCreatedAt())
			return startEvents(ctx, r)
		})
		if err == nil {
			closeOnce(c.started)
			e.resume(ctx, c)
			return
		}
	}
	done, err := c.turn.take(ctx) // the next start waits
	if err != nil {
		return
	}
	e.background(func(ctx context.Context) {
		defer done()
		e.dropHalfStarted(ctx, c)
	})
}

// dropHalfStarted deletes what there is of a task that never ran until nothing is left. The
// shim may still be at the creation that it was asked for, so one look is not enough.
func (e *Engine) dropHalfStarted(ctx context.Context, c *container) {
	for {
		_, err := e.p.Tasks.Delete(ctx, c.sandbox.id, c.id, "")
		if errdefs.IsNotFound(err) {
			return
		}
		if err != nil {
			e.log.WarnContext(ctx, "half-started task remains", slog.String("container_id", c.id), slog.Any("error", err))
			return
		}
		if !pause(ctx, retryFirst) {
			return
		}
	}
}

// discardAtReboot shows a container that was never started as ended: nothing of what was
// made for it is left to start.
func (e *Engine) discardAtReboot(ctx context.Context, c *container) {
	end := func(r *recordv1.Container) {
		setExit(r, pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}, false)
		r.Message = "the node was restarted before the container was started"
		r.TaskDeleted = true
	}
	err := e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		end(r)
		return nil, nil
	})
	if err != nil {
		e.log.WarnContext(ctx, "end at reboot cannot be recorded", slog.String("container_id", c.id), slog.Any("error", err))
		next := proto.CloneOf(c.rec.Load())
		end(next)
		c.rec.Store(next)
	}
	closeOnce(c.started)
	closeOnce(c.exited)
}

// endAtReboot records the end of a container that the node took down with it.
func (e *Engine) endAtReboot(ctx context.Context, c *container) {
	err := e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		setExit(r, pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}, false)
		r.Message = "the node was restarted while the container ran"
		r.TaskDeleted = true
		exit, err := exitEvent(ctx, r)
		if err != nil {
			return nil, err
		}
		del, err := deleteEvent(ctx, r)
		return []*recordv1.Event{exit, del}, err
	})
	if err != nil {
		e.log.WarnContext(ctx, "end at reboot cannot be recorded", slog.String("container_id", c.id), slog.Any("error", err))
		next := proto.CloneOf(c.rec.Load())
		setExit(next, pod.Exit{Code: pod.ExitCodeUnknown, At: time.Now(), Unknown: true}, false)
		c.rec.Store(next)
	}
	closeOnce(c.exited)
}

// removeOrphans removes what no record names: root file systems and folders of containers
// that were never committed, shims and namespaces whose record is lost.
func (e *Engine) removeOrphans(ctx context.Context, shims []string) {
	for _, id := range shims {
		if _, err := e.sandbox(id); err != nil {
			e.logOrphan(ctx, "shim", id, e.p.Controller.Shutdown(ctx, id))
		}
	}
	pins, err := e.p.Namespaces.List()
	if err != nil {
		e.log.WarnContext(ctx, "namespaces cannot be listed", slog.Any("error", err))
	}
	for _, id := range pins {
		if _, err := e.sandbox(id); err != nil {
			e.logOrphan(ctx, "namespaces", id, e.p.Namespaces.Unpin(ctx, id))
		}
	}
	keys, err := e.p.Rootfs.Keys(ctx)
	if err != nil {
		e.log.WarnContext(ctx, "root file systems cannot be listed", slog.Any("error", err))
	}
	for snapshotter, list := range keys {
		for _, key := range list {
			if _, err := e.container(key); err == nil {
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
		if _, err := e.container(entry.Name()); err == nil {
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
