package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"
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

// Prepare makes everything that a pod needs, seen by no list. It returns the record
// of a READY sandbox with existing set if the same request was fulfilled before.
func (u *UseCases) Prepare(ctx context.Context, session string, cfg *criv1.PodSandboxConfig, handlerName string) (rec *recordv1.Sandbox, existing bool, err error) {
	err = u.p.Table.Ready()
	if err != nil {
		return nil, false, err
	}
	err = u.p.Table.CheckSession(session)
	if err != nil {
		return nil, false, err
	}
	handler, err := u.p.Handler(handlerName)
	if err != nil {
		return nil, false, err
	}
	want, err := u.p.Specs.PinRequest(cfg)
	if err != nil {
		return nil, false, err
	}
	s := table.NewSandbox(&recordv1.Sandbox{
		Id: table.NewID(), State: table.SandboxPreparing, Config: cfg, RuntimeHandler: handlerName,
		CreatedAt: timestamppb.Now(), BootId: u.p.BootID,
	})
	s.Handler, s.Session = handler, session
	present, err := u.admit(ctx, s)
	if err != nil || present != nil {
		return present, present != nil, err
	}
	done, err := s.Turn.Take(ctx)
	if err != nil {
		return nil, false, err
	}
	defer done()
	err = u.p.Files.CheckLogs(cfg)
	var label string
	if err == nil {
		label, err = u.p.Specs.PodLabel(cfg)
	}
	if err == nil {
		err = u.build(ctx, s, want, label)
	}
	if err != nil {
		u.prepared.Undo(ctx, s)
		return nil, false, fmt.Errorf("sandbox %s/%s: %w", cfg.GetMetadata().GetNamespace(), cfg.GetMetadata().GetName(), err)
	}
	return s.Record(), false, nil
}

// admit reserves the sandbox's name and enters it into the index. If the name is
// held, it returns the READY sandbox that fulfils the request, or says why there is none.
func (u *UseCases) admit(ctx context.Context, s *table.Sandbox) (*recordv1.Sandbox, error) {
	m := s.Record().GetConfig().GetMetadata()
	for {
		holderID, holder := u.p.Table.AddSandbox(s)
		if holderID == "" {
			return nil, nil //nolint:nilnil // no holder is a regular answer
		}
		if holder == nil {
			return nil, fmt.Errorf("name of sandbox %q is being released: %w", holderID, errdefs.ErrUnavailable)
		}
		rec := holder.Record()
		switch {
		case rec.GetState() == table.SandboxReady && rec.GetExitedAt() == nil && sameRequest(rec, s.Record()):
			return rec, nil
		case rec.GetState() == table.SandboxPreparing && (holder.Doomed() || !u.p.Table.SessionOpen(holder.Session)):
			// It failed, or its gateway is gone; whoever asks again need not wait for a retry
			// or the grace time.
			err := u.Abort(ctx, holderID)
			if err != nil {
				return nil, err
			}
		case rec.GetState() == table.SandboxPreparing:
			return nil, fmt.Errorf("sandbox %q of this name is being made: %w", holderID, errdefs.ErrUnavailable)
		default:
			return nil, fmt.Errorf("name %s/%s, attempt %d, is held by sandbox %q: %w", m.GetNamespace(), m.GetName(), m.GetAttempt(), holderID, errdefs.ErrAlreadyExists)
		}
	}
}

func sameRequest(a, b *recordv1.Sandbox) bool {
	return a.GetRuntimeHandler() == b.GetRuntimeHandler() && proto.Equal(a.GetConfig(), b.GetConfig())
}

// build makes the parts of a sandbox side by side.
func (u *UseCases) build(ctx context.Context, s *table.Sandbox, want port.PinRequest, label string) error {
	cfg := s.Record().GetConfig()
	err := u.p.Table.SaveSandbox(ctx, s, func(r *recordv1.Sandbox) {
		r.NetworkAttached = want.Network
		r.SelinuxLabel = label
	})
	if err != nil {
		u.p.Specs.FreeLabel(label) // no record tells of it
		return err
	}
	s.Namespaces, err = u.pin(ctx, s.ID, want)
	if err != nil {
		return err
	}
	var instance port.Instance
	var attached pod.NetworkResult
	g, gctx := errgroup.WithContext(ctx)
	if want.Network {
		g.Go(func() error {
			var err error
			attached, err = u.attach(gctx, s)
			if err != nil {
				return err
			}
			return u.p.Namespaces.SetInterfaces(s.ID, want)
		})
	}
	g.Go(func() error {
		var err error
		s.Files, err = u.p.Files.Make(gctx, s.ID, cfg)
		return err
	})
	g.Go(func() error {
		var err error
		// Not ended by the failure of another part: a shim that is stopped in the middle of
		// its start leaves a socket that nobody knows of.
		instance, err = u.startShim(ctx, s)
		return err
	})
	err = g.Wait()
	if err != nil {
		return err
	}
	// Shown, not yet written: the commit writes it, and until then the record that is on
	// disk is enough to undo everything.
	next := proto.CloneOf(s.Record())
	next.NetnsPath = s.Namespaces["network"]
	next.Namespaces = s.Namespaces
	next.Ips, next.CniResult = attached.IPs, attached.Raw
	next.Pid = instance.Pid
	s.Show(next)
	return nil
}

func (u *UseCases) pin(ctx context.Context, id string, want port.PinRequest) (map[string]string, error) {
	ctx, span := u.p.Tracer.Start(ctx, "sandboxd.pin_namespaces")
	defer span.End()
	return u.p.Namespaces.Pin(ctx, id, want)
}

func (u *UseCases) attach(ctx context.Context, s *table.Sandbox) (pod.NetworkResult, error) {
	return u.p.Network.Attach(ctx, u.networkRequest(s))
}

func (u *UseCases) networkRequest(s *table.Sandbox) pod.NetworkRequest {
	rec := s.Record()
	path := s.Namespaces["network"]
	if path == "" {
		path = rec.GetNetnsPath()
	}
	return pod.NetworkRequest{SandboxID: s.ID, Config: rec.GetConfig(), NetnsPath: path, Handler: s.Handler.Name}
}

func (u *UseCases) startShim(ctx context.Context, s *table.Sandbox) (port.Instance, error) {
	ctx, span := u.p.Tracer.Start(ctx, "sandboxd.start_shim")
	defer span.End()
	cfg := s.Record().GetConfig()
	spec := port.SandboxSpec{ID: s.ID, Handler: s.Handler, Config: cfg, Namespaces: s.Namespaces}
	if sharedPID(cfg) {
		init, err := u.p.Specs.Init(port.SpecInput{SandboxID: s.ID, Sandbox: cfg, Handler: s.Handler, Namespaces: s.Namespaces, PodLabel: s.Record().GetSelinuxLabel()})
		if err != nil {
			return port.Instance{}, err
		}
		spec.Init, err = json.Marshal(init)
		if err != nil {
			return port.Instance{}, err
		}
	}
	err := u.p.Controller.Create(ctx, spec)
	if err != nil {
		return port.Instance{}, err
	}
	return u.p.Controller.Start(ctx, s.ID)
}

// sharedPID says whether the pod's containers share one PID namespace of their own.
func sharedPID(cfg *criv1.PodSandboxConfig) bool {
	return cfg.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() == criv1.NamespaceMode_POD &&
		cfg.GetLinux().GetSecurityContext().GetNamespaceOptions() != nil
}

// Commit makes a prepared sandbox READY and visible.
func (u *UseCases) Commit(ctx context.Context, id string) error {
	s, done, err := u.prepared.Enter(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	switch s.Record().GetState() {
	case table.SandboxReady:
		return nil
	case table.SandboxPreparing:
		if s.Doomed() {
			// What an earlier process prepared is known by half, and is being undone.
			return table.PreparationLost(fmt.Errorf("sandbox %q is being undone", id))
		}
	default:
		return fmt.Errorf("sandbox %q was stopped before its commit: %w", id, errdefs.ErrFailedPrecondition)
	}
	if _, err := u.p.Table.Sandbox(id); err != nil { // aborted while this call waited for its turn
		return table.PreparationLost(err)
	}
	ev, err := event.SandboxStart(ctx, id)
	if err != nil {
		return err
	}
	err = u.p.Table.SaveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.State = table.SandboxReady }, ev)
	if err != nil {
		return err
	}
	u.watch(s)
	return nil
}

// Abort undoes Prepare. An unknown id is not an error; a committed sandbox
// is left alone with ErrFailedPrecondition.
func (u *UseCases) Abort(ctx context.Context, id string) error { return u.prepared.Abort(ctx, id) }

// destroy removes every part of a sandbox that was never committed, and its record.
// A network that cannot be released now is released later, from a record of its own.
func (u *UseCases) destroy(ctx context.Context, s *table.Sandbox) error {
	rec := s.Record()
	shimErr := u.p.Controller.Shutdown(ctx, s.ID)
	var release *recordv1.NetworkRelease
	if rec.GetNetworkAttached() {
		err := u.p.Network.Detach(ctx, u.networkRequest(s), rec.GetCniResult())
		if err != nil {
			u.p.Log.WarnContext(ctx, "network is released later", slog.String("sandbox_id", s.ID), slog.Any("error", err))
			release = &recordv1.NetworkRelease{SandboxId: s.ID, Config: rec.GetConfig(), NetnsPath: rec.GetNetnsPath(), CniResult: rec.GetCniResult()}
		}
	}
	// A shim that died while it made the pod's own process has left the process's cgroup.
	err := errors.Join(shimErr, u.clearInit(ctx, s), u.p.Namespaces.Unpin(ctx, s.ID), u.p.Files.Remove(ctx, s.ID))
	if err != nil {
		return err
	}
	err = u.p.Table.DropSandbox(ctx, s, release)
	if err != nil {
		return err
	}
	u.p.Specs.FreeLabel(rec.GetSelinuxLabel())
	if release != nil {
		u.OweRelease(release)
	}
	return nil
}
