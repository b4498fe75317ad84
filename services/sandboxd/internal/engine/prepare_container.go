package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// ContainerView is a container with its pod, as NRI plugins see them.
type ContainerView struct {
	Pod       *nri.PodSandbox
	Container *nri.Container
}

// PrepareContainer makes root file system and specification of a container, seen by no
// list. It returns the record of a CREATED container with existing set if the same request
// was fulfilled before.
func (e *Engine) PrepareContainer(ctx context.Context, session, sandboxID string, cfg *criv1.ContainerConfig) (id string, existing bool, err error) {
	err = e.ready()
	if err != nil {
		return "", false, err
	}
	err = e.checkSession(session)
	if err != nil {
		return "", false, err
	}
	s, err := e.sandbox(sandboxID)
	if err != nil {
		return "", false, err
	}
	c, present, err := e.admitContainer(ctx, s, session, cfg)
	if err != nil {
		return "", false, err
	}
	if present != nil {
		return present.id, true, nil
	}
	done, err := c.turn.take(ctx)
	if err != nil {
		return "", false, err
	}
	defer done()
	err = e.buildContainer(ctx, c)
	if err != nil {
		undo(ctx, func(ctx context.Context) {
			undoErr := e.destroyContainer(ctx, c)
			if undoErr != nil {
				e.log.WarnContext(ctx, "undo of a container is incomplete", slog.String("container_id", c.id), slog.Any("error", undoErr))
				e.doomContainer(c)
			}
		})
		return "", false, fmt.Errorf("container %q: %w", cfg.GetMetadata().GetName(), err)
	}
	return c.id, false, nil
}

// admitContainer enters a new container into the index while the sandbox is READY, or
// finds the one that fulfils the request.
func (e *Engine) admitContainer(ctx context.Context, s *sandbox, session string, cfg *criv1.ContainerConfig) (admitted, present *container, err error) {
	done, err := s.turn.take(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer done()
	rec := s.rec.Load()
	if rec.GetState() == sandboxPreparing {
		return nil, nil, fmt.Errorf("sandbox %q: %w", s.id, errdefs.ErrNotFound)
	}
	if rec.GetState() != sandboxReady || rec.GetExitedAt() != nil {
		return nil, nil, fmt.Errorf("sandbox %q is not ready: %w", s.id, errdefs.ErrFailedPrecondition)
	}
	c := newContainer(&recordv1.Container{
		Id: newID(), SandboxId: s.id, State: containerPreparing, Config: cfg, CreatedAt: timestamp(time.Now()),
	}, s)
	c.session = session
	key := containerKey(s.id, cfg.GetMetadata())
	holderID, free := e.reserve(key, c.id)
	if free {
		e.mu.Lock()
		e.containers[c.id] = c
		e.mu.Unlock()
		return c, nil, nil
	}
	holder, err := e.container(holderID)
	if err != nil {
		return nil, nil, fmt.Errorf("name of container %q is being released: %w", holderID, errdefs.ErrUnavailable)
	}
	held := holder.rec.Load()
	switch {
	case held.GetState() == containerCreated && sameContainer(held.GetConfig(), cfg):
		return nil, holder, nil
	case held.GetState() == containerPreparing:
		return nil, nil, fmt.Errorf("container %q of this name is being made: %w", holderID, errdefs.ErrUnavailable)
	default:
		return nil, nil, fmt.Errorf("name %s is held by container %q: %w", key, holderID, errdefs.ErrAlreadyExists)
	}
}

// buildContainer makes the parts of a container.
func (e *Engine) buildContainer(ctx context.Context, c *container) error {
	cfg := c.rec.Load().GetConfig()
	sandboxRec := c.sandbox.rec.Load()
	img, err := e.p.Images.Resolve(ctx, cfg.GetImage().GetImage())
	if err != nil {
		return fmt.Errorf("config.image %q: %w", cfg.GetImage().GetImage(), err)
	}
	img, err = e.p.Images.Unpack(ctx, img, c.sandbox.handler.Snapshotter)
	if err != nil {
		return fmt.Errorf("config.image %q: %w", cfg.GetImage().GetImage(), err)
	}
	// From here on the image is in use, and an undo knows where the root file system is.
	next := proto.CloneOf(c.rec.Load())
	next.ImageId, next.ImageRef, next.Snapshotter = img.ID, img.Ref, img.Snapshotter
	c.rec.Store(next)
	var accounts pod.Accounts
	var imageMounts map[string]imageMount
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		_, err := e.p.Rootfs.Prepare(gctx, c.id, img, pod.IDMapOf(sandboxRec.GetConfig()))
		return err
	})
	g.Go(func() error {
		var err error
		accounts, err = e.p.Rootfs.Accounts(gctx, img)
		return err
	})
	g.Go(func() error {
		var err error
		imageMounts, err = e.mountImages(gctx, c, cfg)
		return err
	})
	err = g.Wait()
	if err != nil {
		return err
	}
	in := SpecInput{
		SandboxID: c.sandbox.id, ContainerID: c.id,
		Sandbox: sandboxRec.GetConfig(), Container: cfg, Image: img, Accounts: accounts,
		Handler: c.sandbox.handler, Namespaces: c.sandbox.namespaces, SandboxPid: sandboxRec.GetPid(),
		Files: c.sandbox.files, Volumes: e.volumes(c.id, img, cfg), ImageMounts: map[string]string{},
	}
	for at, m := range imageMounts {
		in.ImageMounts[at] = m.path
	}
	in.TargetPid, err = e.targetPid(c.sandbox.id, cfg)
	if err != nil {
		return err
	}
	spec, result, err := e.p.Specs.Container(ctx, in)
	if err != nil {
		return err
	}
	c.takeBack = result.Undo
	next = proto.CloneOf(c.rec.Load())
	noteImages(next.GetConfig(), imageMounts)
	next.User = result.User
	next.LogPath = logPath(sandboxRec.GetConfig(), cfg)
	next.StopSignal = stopSignal(cfg, img)
	next.Resources = e.p.Specs.Resources(spec)
	next.CgroupsPath = spec.Linux.CgroupsPath
	c.rec.Store(next)
	c.pending.Store(spec)
	return nil
}

// targetPid finds the first process of the container whose PID namespace is wanted.
func (e *Engine) targetPid(sandboxID string, cfg *criv1.ContainerConfig) (uint32, error) {
	opts := cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if opts.GetPid() != criv1.NamespaceMode_TARGET {
		return 0, nil
	}
	target, err := e.ContainerID(opts.GetTargetId())
	if err != nil {
		return 0, fmt.Errorf("config.linux.security_context.namespace_options.target_id: %w", err)
	}
	t, err := e.container(target)
	if err != nil {
		return 0, err
	}
	rec := t.rec.Load()
	if t.sandbox.id != sandboxID || rec.GetState() != containerRunning {
		return 0, fmt.Errorf("target container %q is not running in this sandbox: %w", target, errdefs.ErrFailedPrecondition)
	}
	return rec.GetPid(), nil
}

// volumes are the mounts of the volumes that an image declares and the pod does not mount.
func (e *Engine) volumes(id string, img pod.Image, cfg *criv1.ContainerConfig) []*criv1.Mount {
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
			HostPath:      filepath.Join(e.volumeDir(id), volumeName(dest)),
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

// CommitContainer applies the NRI adjustment and makes the container visible as CREATED.
func (e *Engine) CommitContainer(ctx context.Context, id string, adj *nri.ContainerAdjustment) error {
	err := e.ready()
	if err != nil {
		return err
	}
	c, err := e.container(id)
	if err != nil {
		return preparationLost(err)
	}
	done, err := c.turn.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	rec := c.rec.Load()
	switch {
	case rec.GetState() == containerCreated:
		return nil
	case rec.GetState() != containerPreparing || c.pending.Load() == nil:
		return fmt.Errorf("container %q was aborted before its commit: %w", id, errdefs.ErrFailedPrecondition)
	case c.sandbox.rec.Load().GetState() != sandboxReady:
		return fmt.Errorf("sandbox %q is not ready: %w", c.sandbox.id, errdefs.ErrFailedPrecondition)
	}
	spec := c.pending.Load()
	if adj != nil {
		err = e.p.Specs.Adjust(spec, adj)
		if err != nil {
			return fmt.Errorf("container %q: NRI adjustment: %w", id, err)
		}
	}
	encoded, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	err = e.saveContainer(ctx, c, func(r *recordv1.Container) ([]*recordv1.Event, error) {
		r.State = containerCreated
		r.Spec = encoded
		r.CgroupsPath = spec.Linux.CgroupsPath
		r.Resources = e.p.Specs.Resources(spec)
		ev, err := createEvent(ctx, r, c.sandbox.handler.RuntimeType)
		return []*recordv1.Event{ev}, err
	})
	if err != nil {
		return err
	}
	c.pending.Store(nil)
	c.takeBack = nil
	return nil
}

// AbortContainer undoes PrepareContainer. An unknown id is not an error.
func (e *Engine) AbortContainer(ctx context.Context, id string) error {
	c, err := e.container(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	done, err := c.turn.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	if c.rec.Load().GetState() != containerPreparing {
		return fmt.Errorf("container %q is committed: %w", id, errdefs.ErrFailedPrecondition)
	}
	if _, err := e.container(id); err != nil {
		return nil
	}
	err = e.destroyContainer(ctx, c)
	if err != nil {
		e.doomContainer(c)
	}
	return err
}

// doomContainer is doomSandbox for a container.
func (e *Engine) doomContainer(c *container) {
	if !c.doomed.CompareAndSwap(false, true) {
		return
	}
	e.background(func(ctx context.Context) {
		e.insist(ctx, "half-made container cannot be removed yet", c.id, func(ctx context.Context) error {
			return e.AbortContainer(ctx, c.id)
		})
	})
}

// destroyContainer removes what a container holds on disk that no record names.
func (e *Engine) destroyContainer(ctx context.Context, c *container) error {
	rec := c.rec.Load()
	if c.takeBack != nil {
		c.takeBack()
		c.takeBack = nil
	}
	err := e.removeStorage(ctx, rec)
	if err != nil {
		return err
	}
	c.pending.Store(nil)
	e.forgetContainer(c, containerKey(c.sandbox.id, rec.GetConfig().GetMetadata()))
	return nil
}

// specOf decodes the specification of a committed container, or returns the pending one.
func (c *container) specOf() (*specs.Spec, error) {
	if p := c.pending.Load(); p != nil {
		return p, nil
	}
	spec := &specs.Spec{}
	err := json.Unmarshal(c.rec.Load().GetSpec(), spec)
	if err != nil {
		return nil, fmt.Errorf("container %q: specification: %w", c.id, err)
	}
	return spec, nil
}

// DescribeContainer returns NRI's view of a container and its pod.
func (e *Engine) DescribeContainer(id string) (ContainerView, error) {
	c, err := e.container(id)
	if err != nil {
		return ContainerView{}, err
	}
	return e.view(c), nil
}

func (e *Engine) view(c *container) ContainerView {
	spec, err := c.specOf()
	if err != nil {
		spec = &specs.Spec{}
	}
	v := ContainerView{Container: e.p.Specs.ContainerView(c.rec.Load(), spec)}
	if c.sandbox != nil {
		v.Pod = e.p.Specs.PodView(c.sandbox.rec.Load())
	}
	return v
}
