package container

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// layerLimit bounds the making of a writable layer.
const layerLimit = 4 * time.Minute

// Prepare makes the specification of a container, seen by no list, and begins with its writable
// layer, which the plugins need not wait for: Commit does. It returns the record of a CREATED
// container with existing set if the same request was fulfilled before. A container that is
// restored has the folder of its pod's checkpoint in from.
func (u *UseCases) Prepare(ctx context.Context, session, sandboxID string, cfg *criv1.ContainerConfig, from string) (id string, existing bool, err error) {
	err = u.p.Table.Ready()
	if err != nil {
		return "", false, err
	}
	err = u.p.Table.CheckSession(session)
	if err != nil {
		return "", false, err
	}
	s, err := u.p.Table.Sandbox(sandboxID)
	if err != nil {
		return "", false, err
	}
	c, present, err := u.admit(ctx, s, session, cfg)
	if err != nil {
		return "", false, err
	}
	if present != nil {
		return present.ID, true, nil
	}
	done, err := c.Turn.Take(ctx)
	if err != nil {
		return "", false, err
	}
	defer done()
	err = u.build(ctx, c)
	if err == nil && from != "" {
		err = u.takeCheckpoint(ctx, c, from)
	}
	if err != nil {
		u.prepared.Undo(ctx, c)
		return "", false, fmt.Errorf("container %q: %w", cfg.GetMetadata().GetName(), err)
	}
	return c.ID, false, nil
}

// admit enters a new container into the index while the sandbox is READY, or
// finds the one that fulfils the request.
func (u *UseCases) admit(ctx context.Context, s *table.Sandbox, session string, cfg *criv1.ContainerConfig) (admitted, present *table.Container, err error) {
	done, err := s.Turn.Take(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer done()
	rec := s.Record()
	if rec.GetState() == table.SandboxPreparing {
		return nil, nil, fmt.Errorf("sandbox %q: %w", s.ID, errdefs.ErrNotFound)
	}
	if rec.GetState() != table.SandboxReady || rec.GetExitedAt() != nil {
		return nil, nil, fmt.Errorf("sandbox %q is not ready: %w", s.ID, errdefs.ErrFailedPrecondition)
	}
	c := table.NewContainer(&recordv1.Container{
		Id: table.NewID(), SandboxId: s.ID, State: table.ContainerPreparing, Config: cfg, CreatedAt: timestamppb.Now(),
	}, s)
	c.Session = session
	holderID, holder := u.p.Table.AddContainer(c)
	switch {
	case holderID == "":
		return c, nil, nil
	case holder == nil:
		return nil, nil, fmt.Errorf("name of container %q is being released: %w", holderID, errdefs.ErrUnavailable)
	}
	held := holder.Record()
	switch {
	case held.GetState() == table.ContainerCreated && sameContainer(held.GetConfig(), cfg):
		return nil, holder, nil
	case held.GetState() == table.ContainerPreparing:
		return nil, nil, fmt.Errorf("container %q of this name is being made: %w", holderID, errdefs.ErrUnavailable)
	default:
		return nil, nil, fmt.Errorf("name %q, attempt %d, is held by container %q: %w", cfg.GetMetadata().GetName(), cfg.GetMetadata().GetAttempt(), holderID, errdefs.ErrAlreadyExists)
	}
}

// build makes the parts of a container.
func (u *UseCases) build(ctx context.Context, c *table.Container) error {
	cfg := c.Record().GetConfig()
	sandboxRec := c.Sandbox.Record()
	if logPath(sandboxRec.GetConfig(), cfg) != "" {
		err := u.p.Files.CheckLogs(sandboxRec.GetConfig())
		if err != nil {
			return err
		}
	}
	img, err := u.p.Images.Resolve(ctx, cfg.GetImage().GetImage())
	if err != nil {
		return fmt.Errorf("config.image %q: %w", cfg.GetImage().GetImage(), err)
	}
	img, err = u.p.Images.Unpack(ctx, img, c.Sandbox.Handler.Snapshotter)
	if err != nil {
		return fmt.Errorf("config.image %q: %w", cfg.GetImage().GetImage(), err)
	}
	// From here on the image is in use, and an undo knows where the root file system is.
	next := proto.CloneOf(c.Record())
	next.ImageId, next.ImageRef, next.ImageName, next.Snapshotter = img.ID, img.Ref, img.Name, img.Snapshotter
	c.Show(next)
	var accounts pod.Accounts
	var imageMounts map[string]imageMount
	c.Layer = u.p.Work.Start(ctx, layerLimit, func(ctx context.Context) error {
		_, err := u.p.Rootfs.Prepare(ctx, c.ID, img, pod.IDMapOf(sandboxRec.GetConfig()))
		return err
	})
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		var err error
		accounts, err = u.p.Rootfs.Accounts(gctx, img)
		return err
	})
	g.Go(func() error {
		var err error
		imageMounts, err = u.mountImages(gctx, c, cfg)
		return err
	})
	err = g.Wait()
	if err != nil {
		return err
	}
	in := port.SpecInput{
		SandboxID: c.Sandbox.ID, ContainerID: c.ID,
		Sandbox: sandboxRec.GetConfig(), Container: cfg, Image: img, Accounts: accounts,
		Handler: c.Sandbox.Handler, Namespaces: c.Sandbox.Namespaces, SandboxPid: sandboxRec.GetPid(), PodLabel: sandboxRec.GetSelinuxLabel(),
		Files: c.Sandbox.Files, Volumes: u.volumes(c.ID, img, cfg), ImageMounts: map[string]string{},
	}
	for at, m := range imageMounts {
		in.ImageMounts[at] = m.path
	}
	in.TargetPid, err = u.targetPid(c.Sandbox.ID, cfg)
	if err != nil {
		return err
	}
	spec, result, err := u.p.Specs.Container(ctx, in)
	if err != nil {
		return err
	}
	c.TakeBack = result.Undo
	next = proto.CloneOf(c.Record())
	noteImages(next.GetConfig(), imageMounts)
	next.User = result.User
	next.LogPath = logPath(sandboxRec.GetConfig(), cfg)
	next.StopSignal = stopSignal(cfg, img)
	next.Resources = u.p.Specs.Resources(spec)
	next.CgroupsPath = spec.Linux.CgroupsPath
	c.Show(next)
	c.Pending.Store(spec)
	return nil
}

// targetPid finds the first process of the container whose PID namespace is wanted.
func (u *UseCases) targetPid(sandboxID string, cfg *criv1.ContainerConfig) (uint32, error) {
	opts := cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if opts.GetPid() != criv1.NamespaceMode_TARGET {
		return 0, nil
	}
	target, err := u.p.Table.ContainerID(opts.GetTargetId())
	if err != nil {
		return 0, fmt.Errorf("config.linux.security_context.namespace_options.target_id: %w", err)
	}
	t, err := u.p.Table.Container(target)
	if err != nil {
		return 0, err
	}
	rec := t.Record()
	if t.Sandbox.ID != sandboxID || rec.GetState() != table.ContainerRunning {
		return 0, fmt.Errorf("target container %q is not running in this sandbox: %w", target, errdefs.ErrFailedPrecondition)
	}
	return rec.GetPid(), nil
}

// volumes are the mounts of the volumes that an image declares and the pod does not mount.
func (u *UseCases) volumes(id string, img pod.Image, cfg *criv1.ContainerConfig) []*criv1.Mount {
	mounted := map[string]bool{}
	for _, m := range cfg.GetMounts() {
		mounted[filepath.Clean(m.GetContainerPath())] = true
	}
	var out []*criv1.Mount
	for dest := range img.Config.Volumes {
		if mounted[filepath.Clean(dest)] {
			continue
		}
		out = append(out, &criv1.Mount{
			ContainerPath: dest,
			HostPath:      filepath.Join(u.volumeDir(id), volumeName(dest)), SelinuxRelabel: true,
		})
	}
	return out
}

func logPath(sandbox *criv1.PodSandboxConfig, cfg *criv1.ContainerConfig) string {
	if sandbox.GetLogDirectory() == "" || cfg.GetLogPath() == "" {
		return ""
	}
	return filepath.Join(sandbox.GetLogDirectory(), cfg.GetLogPath())
}

// stopSignal is the CRI's, else the image's, else SIGTERM.
func stopSignal(cfg *criv1.ContainerConfig, img pod.Image) string {
	if sig := cfg.GetStopSignal(); sig != criv1.Signal_SIGNAL_RUNTIME_DEFAULT {
		return signalName(sig)
	}
	if img.Config.StopSignal != "" {
		return img.Config.StopSignal
	}
	return "SIGTERM"
}

// Commit applies the NRI adjustment, waits for the writable layer and makes the container
// visible as CREATED.
func (u *UseCases) Commit(ctx context.Context, id string, adj *nri.ContainerAdjustment) error {
	c, done, err := u.prepared.Enter(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	rec := c.Record()
	switch {
	case rec.GetState() == table.ContainerCreated:
		return nil
	case rec.GetState() != table.ContainerPreparing || c.Pending.Load() == nil:
		return fmt.Errorf("container %q was aborted before its commit: %w", id, errdefs.ErrFailedPrecondition)
	case c.Sandbox.Record().GetState() != table.SandboxReady:
		return fmt.Errorf("sandbox %q is not ready: %w", c.Sandbox.ID, errdefs.ErrFailedPrecondition)
	}
	spec := c.Pending.Load()
	if adj != nil {
		// What is pending stays as it is: a commit that fails may come again, with the same
		// or another adjustment.
		spec, err = u.p.Specs.Adjust(spec, adj)
		if err != nil {
			return fmt.Errorf("container %q: NRI adjustment: %w", id, err)
		}
	}
	encoded, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	err = c.Layer.Wait(ctx)
	if err != nil {
		return fmt.Errorf("container %q: %w", id, err)
	}
	err = u.p.Table.SaveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		r.State = table.ContainerCreated
		r.Spec = encoded
		r.CgroupsPath = spec.Linux.CgroupsPath
		r.Resources = u.p.Specs.Resources(spec)
		ev, err := event.ContainerCreate(ctx, r, c.Sandbox.Handler.RuntimeType)
		return []*recordv1.Event{ev}, err
	})
	if err != nil {
		return err
	}
	c.Pending.Store(nil)
	c.Layer, c.TakeBack = nil, nil
	return nil
}

// Abort undoes Prepare. An unknown id is not an error; a committed container
// is left alone with ErrFailedPrecondition.
func (u *UseCases) Abort(ctx context.Context, id string) error { return u.prepared.Abort(ctx, id) }

// destroy removes what a container holds on disk that no record names.
func (u *UseCases) destroy(ctx context.Context, c *table.Container) error {
	rec := c.Record()
	if c.TakeBack != nil {
		c.TakeBack()
		c.TakeBack = nil
	}
	err := c.Layer.Cancel(ctx)
	if err != nil {
		return fmt.Errorf("wait for the writable layer: %w", err)
	}
	err = u.removeStorage(ctx, rec)
	if err != nil {
		return err
	}
	c.Pending.Store(nil)
	u.p.Table.ForgetContainer(c)
	return nil
}
