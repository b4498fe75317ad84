// Package capture writes checkpoints: of one container into an archive, of several
// containers of a pod, at one point in time, into a folder.
//
// Whatever happens, no container stays paused: it is resumed before the call returns, and
// after a restart of the process. A checkpoint that fails leaves nothing. While a container
// is captured it is not stopped or changed: those calls wait for their turn, and the time
// limit of the checkpoint bounds that.
package capture

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/checkpoint"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// atOnce is how many containers of a pod are captured side by side.
const atOnce = 4

// Parts are what a Capturer works with. All must be set.
type Parts struct {
	Table   *table.Table
	Work    *work.Group
	Tasks   port.Tasks
	Rootfs  port.Rootfs
	Images  port.Images
	Handler func(name string) (pod.Handler, error)
	// ContainerDir is the folder with a folder for each container.
	ContainerDir string
	Log          *slog.Logger
}

// Capturer takes checkpoints. Its methods are safe for concurrent use.
type Capturer struct{ p Parts }

// New returns a capturer.
func New(p Parts) *Capturer { return &Capturer{p} }

// Container writes a running container, which runs on, as an archive to location, within a
// time limit. Errors: ErrNotFound, ErrInvalidArgument and ErrAlreadyExists (location),
// ErrFailedPrecondition (not running; the node cannot), context.DeadlineExceeded.
func (u *Capturer) Container(ctx context.Context, id, location string, limit time.Duration) error {
	c, err := u.p.Table.Running(id)
	if err != nil {
		return err
	}
	err = checkpoint.CheckLocation(location)
	if err != nil {
		return err
	}
	err = u.p.Tasks.CheckpointReady(ctx, c.Sandbox.Handler)
	if err != nil {
		return fmt.Errorf("checkpoint of container %q: %w", id, err)
	}
	ctx, cancel := limited(ctx, limit)
	defer cancel()
	err = u.inTurn(ctx, []*table.Container{c}, func() error { return u.captureOne(ctx, c, location) })
	if err != nil {
		return fmt.Errorf("checkpoint of container %q: %w", id, err)
	}
	return nil
}

// captureOne captures a container beside its other files and then makes the archive, during
// which the container runs again.
func (u *Capturer) captureOne(ctx context.Context, c *table.Container, location string) (err error) {
	dir := u.captured(c.ID)
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	err = u.frozen(ctx, []*table.Container{c}, "", func(ctx context.Context) error { return u.capture(ctx, c, dir) })
	if err != nil {
		return err
	}
	return checkpoint.Archive(ctx, dir, location)
}

// Pod writes running containers of a ready sandbox, which run on, into an empty folder,
// within a time limit. All are paused before the first is captured, and resumed after the
// last. Errors as of Container.
func (u *Capturer) Pod(ctx context.Context, sandboxID string, ids []string, dir string, options map[string]string, limit time.Duration) error {
	err := u.p.Table.Ready()
	if err != nil {
		return err
	}
	s, err := u.p.Table.Sandbox(sandboxID)
	if err != nil {
		return err
	}
	list, err := u.selected(s, ids)
	if err == nil {
		err = noOptions(s.Handler, options)
	}
	if err == nil {
		err = checkpoint.CheckOutput(dir)
	}
	if err == nil {
		err = u.p.Tasks.CheckpointReady(ctx, s.Handler)
	}
	if err != nil {
		return fmt.Errorf("checkpoint of sandbox %q: %w", sandboxID, err)
	}
	ctx, cancel := limited(ctx, limit)
	defer cancel()
	err = u.inTurn(ctx, list, func() error {
		return u.frozen(ctx, list, dir, func(ctx context.Context) error { return u.capturePod(ctx, s, list, dir) })
	})
	if err != nil {
		return fmt.Errorf("checkpoint of sandbox %q: %w", sandboxID, errors.Join(err, checkpoint.Clear(dir)))
	}
	return nil
}

func limited(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done after %v: %w", limit, context.DeadlineExceeded))
}

// noOptions refuses options: what is not known is not ignored.
func noOptions(h pod.Handler, options map[string]string) error {
	for key := range options {
		return fmt.Errorf("options: runtime handler %q does not know %q, it has no options: %w", h.Name, key, errdefs.ErrInvalidArgument)
	}
	return nil
}

// selected finds the containers of a request, by id.
func (u *Capturer) selected(s *table.Sandbox, ids []string) ([]*table.Container, error) {
	if rec := s.Record(); rec.GetState() != table.SandboxReady || rec.GetExitedAt() != nil {
		return nil, fmt.Errorf("it is not ready: %w", errdefs.ErrFailedPrecondition)
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("container_ids must not be empty: %w", errdefs.ErrInvalidArgument)
	}
	var list []*table.Container
	names := map[string]bool{}
	for _, id := range ids {
		c, err := u.p.Table.Running(id)
		if err != nil {
			return nil, err
		}
		if c.Sandbox.ID != s.ID {
			return nil, fmt.Errorf("container %q is in another sandbox: %w", id, errdefs.ErrInvalidArgument)
		}
		name := c.Record().GetConfig().GetMetadata().GetName()
		if names[name] {
			return nil, fmt.Errorf("container_ids: container %q is there twice: %w", name, errdefs.ErrInvalidArgument)
		}
		names[name] = true
		list = append(list, c)
	}
	// The order in which turns are taken is the same for all, so that none waits in a circle.
	slices.SortFunc(list, func(a, b *table.Container) int { return strings.Compare(a.ID, b.ID) })
	return list, nil
}

// inTurn runs fn while nothing else changes the containers, all of which run.
func (u *Capturer) inTurn(ctx context.Context, list []*table.Container, fn func() error) error {
	for _, c := range list {
		done, err := c.Turn.Take(ctx)
		if err != nil {
			return err
		}
		defer done()
		if s := c.Record().GetState(); s != table.ContainerRunning {
			return table.NotRunning(c.ID, s)
		}
	}
	return fn()
}

// frozen runs fn while containers are paused. The caller's time ends fn; the resuming has
// time of its own. output is the folder of a pod checkpoint, which is emptied if the process
// dies meanwhile; it may be empty.
func (u *Capturer) frozen(ctx context.Context, list []*table.Container, output string, fn func(context.Context) error) (err error) {
	for _, c := range list {
		err := u.setMark(c.ID, output)
		if err != nil {
			return errors.Join(err, u.unmark(list))
		}
	}
	defer work.Undo(ctx, func(ctx context.Context) { err = errors.Join(err, u.thawAll(ctx, list)) })
	err = each(ctx, list, len(list), u.pause)
	if err == nil {
		err = fn(ctx)
	}
	if ctx.Err() != nil && err != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}

// each runs fn for all containers, some side by side, and waits for all of them.
func each(ctx context.Context, list []*table.Container, most int, fn func(context.Context, *table.Container) error) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(most)
	for _, c := range list {
		g.Go(func() error { return fn(gctx, c) })
	}
	return g.Wait()
}

func (u *Capturer) pause(ctx context.Context, c *table.Container) error {
	err := u.p.Tasks.Pause(ctx, c.Sandbox.ID, c.ID)
	if err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	u.tell(ctx, c, event.TaskPaused)
	return nil
}

// thawAll resumes all containers, those too whose pausing failed or had no answer.
func (u *Capturer) thawAll(ctx context.Context, list []*table.Container) error {
	errs := make([]error, len(list))
	g := new(errgroup.Group)
	for i, c := range list {
		g.Go(func() error {
			errs[i] = u.thaw(ctx, c)
			if errs[i] != nil {
				u.p.Work.Go(func(ctx context.Context) { u.insist(ctx, c) })
			}
			return nil
		})
	}
	return errors.Join(g.Wait(), errors.Join(errs...))
}

// thaw resumes a container if it is paused, and takes its mark away.
func (u *Capturer) thaw(ctx context.Context, c *table.Container) error {
	resumeErr := u.p.Tasks.Resume(ctx, c.Sandbox.ID, c.ID)
	if resumeErr == nil {
		u.tell(ctx, c, event.TaskResumed)
		return u.unmark([]*table.Container{c})
	}
	st, err := u.p.Tasks.State(ctx, c.Sandbox.ID, c.ID, "")
	switch {
	case errdefs.IsNotFound(err), err == nil && st.Status != "paused":
		return u.unmark([]*table.Container{c}) // it runs or has ended
	default:
		return fmt.Errorf("resume: %w", errors.Join(resumeErr, err))
	}
}

func (u *Capturer) insist(ctx context.Context, c *table.Container) {
	u.p.Work.Insist(ctx, "resume container", slog.String("container_id", c.ID), func(ctx context.Context) error {
		if _, err := u.p.Table.Container(c.ID); err != nil {
			return nil //nolint:nilerr // it is removed
		}
		return u.thaw(ctx, c)
	})
}

// Recover resumes what was paused when the process died.
func (u *Capturer) Recover(ctx context.Context) {
	for _, c := range u.p.Table.Containers() {
		err := os.RemoveAll(u.captured(c.ID))
		if err != nil {
			u.p.Log.WarnContext(ctx, "data of a checkpoint remains until its container is removed", slog.String("container_id", c.ID), slog.Any("error", err))
		}
		output, err := os.ReadFile(filepath.Join(u.mark(c.ID), outputFile))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		u.p.Work.Go(func(ctx context.Context) {
			u.insist(ctx, c)
			u.clear(ctx, string(output))
		})
	}
}

// clear empties the folder of a pod checkpoint that was cut off.
func (u *Capturer) clear(ctx context.Context, output string) {
	if output == "" {
		return
	}
	err := checkpoint.Clear(output)
	if err != nil {
		u.p.Log.WarnContext(ctx, "rest of a checkpoint remains", slog.String("path", output), slog.Any("error", err))
	}
}

// outputFile is the file in a mark with the folder of the pod checkpoint.
const outputFile = "output"

// setMark marks a container as one that may be paused.
func (u *Capturer) setMark(id, output string) error {
	err := os.MkdirAll(u.mark(id), 0o700)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(u.mark(id), outputFile), []byte(output), 0o600)
}

// mark is the folder that a container has while it may be paused.
func (u *Capturer) mark(id string) string { return filepath.Join(u.p.ContainerDir, id, "paused") }

// captured is the folder of what an archive is made from.
func (u *Capturer) captured(id string) string { return filepath.Join(u.p.ContainerDir, id, "captured") }

func (u *Capturer) unmark(list []*table.Container) error {
	var errs []error
	for _, c := range list {
		errs = append(errs, os.RemoveAll(u.mark(c.ID)))
	}
	return errors.Join(errs...)
}

func (u *Capturer) capturePod(ctx context.Context, s *table.Sandbox, list []*table.Container, dir string) error {
	recs := make([]*recordv1.Container, 0, len(list))
	for _, c := range list {
		recs = append(recs, c.Record())
	}
	desc, err := checkpoint.NewPod(s.Handler.RuntimeType, s.Handler.BinaryName, s.Record().GetConfig(), recs)
	if err != nil {
		return err
	}
	err = each(ctx, list, atOnce, func(ctx context.Context, c *table.Container) error {
		return u.capture(ctx, c, checkpoint.Dir(dir, c.Record().GetConfig().GetMetadata().GetName()))
	})
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return err
	}
	return desc.Write(dir)
}

// capture writes the files of a paused container into a folder.
func (u *Capturer) capture(ctx context.Context, c *table.Container, dir string) error {
	err := os.MkdirAll(dir, 0o700)
	if err != nil {
		return err
	}
	rec := c.Record()
	err = u.p.Tasks.Checkpoint(ctx, c.Sandbox.ID, c.ID, port.CheckpointSpec{
		ImagePath: checkpoint.Images(dir), WorkPath: u.workPath(c, dir), Terminal: rec.GetConfig().GetTty(),
	})
	if err != nil {
		return late(ctx, err)
	}
	u.tell(ctx, c, event.TaskCheckpointed)
	err = u.writeDiff(ctx, rec, checkpoint.RootfsDiff(dir))
	if err != nil {
		return fmt.Errorf("root file system of container %q: %w", c.ID, err)
	}
	err = checkpoint.WriteTree(filepath.Join(u.p.ContainerDir, c.ID, "volumes"), checkpoint.Volumes(dir))
	if err != nil {
		return fmt.Errorf("volumes of container %q: %w", c.ID, err)
	}
	return checkpoint.WriteDumps(dir, rec, c.Sandbox.Handler.RuntimeType)
}

// late tells an error at the deadline from others. The shim has been told the time limit too,
// and may have killed the OCI runtime a moment before the limit has passed here.
func late(ctx context.Context, err error) error {
	const moment = time.Second
	if end, ok := ctx.Deadline(); !ok || time.Until(end) > moment || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
}

// workPath is where the log of the capture goes, where the shim can be told.
func (u *Capturer) workPath(c *table.Container, dir string) string {
	if c.Sandbox.Handler.Sandboxer == pod.SandboxerShim && c.Sandbox.Handler.BinaryName == "" {
		return "" // what is not a shim for OCI runtimes takes no such option
	}
	return dir
}

func (u *Capturer) writeDiff(ctx context.Context, rec *recordv1.Container, path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(u.p.Rootfs.Diff(ctx, rec.GetId(), rec.GetSnapshotter(), f), f.Close())
}

// tell puts an event of a capture into the outbox. The container is not changed, so that a
// lost event is no reason to fail.
func (u *Capturer) tell(ctx context.Context, c *table.Container, of func(context.Context, *recordv1.Container, string) (*recordv1.Event, error)) {
	ev, err := of(ctx, c.Record(), table.NewID())
	if err == nil {
		err = u.p.Table.Append(ctx, ev)
	}
	if err != nil {
		u.p.Log.WarnContext(ctx, "event is lost", slog.String("container_id", c.ID), slog.Any("error", err))
	}
}
