package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// PrepareSandbox makes everything that a pod needs, seen by no list. It returns the record
// of a READY sandbox with existing set if the same request was fulfilled before.
func (e *Engine) PrepareSandbox(ctx context.Context, session string, cfg *criv1.PodSandboxConfig, handlerName string) (rec *recordv1.Sandbox, existing bool, err error) {
	err = e.ready()
	if err != nil {
		return nil, false, err
	}
	err = e.checkSession(session)
	if err != nil {
		return nil, false, err
	}
	handler, err := e.handler(handlerName)
	if err != nil {
		return nil, false, err
	}
	want, err := e.p.Specs.PinRequest(cfg)
	if err != nil {
		return nil, false, err
	}
	s := newSandbox(&recordv1.Sandbox{
		Id: newID(), State: sandboxPreparing, Config: cfg, RuntimeHandler: handlerName,
		CreatedAt: timestamp(time.Now()), BootId: e.cfg.BootID,
	})
	s.handler, s.session = handler, session
	present, err := e.admitSandbox(ctx, s)
	if err != nil || present != nil {
		return present, present != nil, err
	}
	done, err := s.turn.take(ctx)
	if err != nil {
		return nil, false, err
	}
	defer done()
	err = e.buildSandbox(ctx, s, want)
	if err != nil {
		undo(ctx, func(ctx context.Context) {
			undoErr := e.destroySandbox(ctx, s)
			if undoErr != nil {
				e.log.WarnContext(ctx, "undo of a sandbox is incomplete", slog.String("sandbox_id", s.id), slog.Any("error", undoErr))
				e.doomSandbox(s)
			}
		})
		return nil, false, fmt.Errorf("sandbox %s/%s: %w", cfg.GetMetadata().GetNamespace(), cfg.GetMetadata().GetName(), err)
	}
	return s.rec.Load(), false, nil
}

// admitSandbox reserves the sandbox's name and enters it into the index. If the name is
// held, it returns the READY sandbox that fulfils the request, or says why there is none.
func (e *Engine) admitSandbox(ctx context.Context, s *sandbox) (*recordv1.Sandbox, error) {
	key := sandboxKey(s.rec.Load().GetConfig().GetMetadata())
	for {
		e.mu.Lock()
		holderID, taken := e.names[key]
		if !taken {
			e.names[key] = s.id
			e.sandboxes[s.id] = s
			e.mu.Unlock()
			return nil, nil //nolint:nilnil // no holder is a regular answer
		}
		holder := e.sandboxes[holderID]
		e.mu.Unlock()
		if holder == nil {
			return nil, fmt.Errorf("name of sandbox %q is being released: %w", holderID, errdefs.ErrUnavailable)
		}
		rec := holder.rec.Load()
		switch {
		case rec.GetState() == sandboxReady && rec.GetExitedAt() == nil && sameRequest(rec, s.rec.Load()):
			return rec, nil
		case rec.GetState() == sandboxPreparing && (holder.doomed.Load() || !e.sessions.isOpen(holder.session)):
			// It failed, or its gateway is gone; whoever asks again need not wait for a retry
			// or the grace time.
			err := e.AbortSandbox(ctx, holderID)
			if err != nil {
				return nil, err
			}
		case rec.GetState() == sandboxPreparing:
			return nil, fmt.Errorf("sandbox %q of this name is being made: %w", holderID, errdefs.ErrUnavailable)
		default:
			return nil, fmt.Errorf("name %s is held by sandbox %q: %w", key, holderID, errdefs.ErrAlreadyExists)
		}
	}
}

func sameRequest(a, b *recordv1.Sandbox) bool {
	return a.GetRuntimeHandler() == b.GetRuntimeHandler() && proto.Equal(a.GetConfig(), b.GetConfig())
}

// buildSandbox makes the parts of a sandbox side by side.
func (e *Engine) buildSandbox(ctx context.Context, s *sandbox, want PinRequest) error {
	cfg := s.rec.Load().GetConfig()
	err := e.saveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.NetworkAttached = want.Network })
	if err != nil {
		return err
	}
	s.namespaces, err = e.pin(ctx, s.id, want)
	if err != nil {
		return err
	}
	var instance Instance
	var attached pod.NetworkResult
	g, gctx := errgroup.WithContext(ctx)
	if want.Network {
		g.Go(func() error {
			var err error
			attached, err = e.attach(gctx, s)
			return err
		})
	}
	g.Go(func() error {
		var err error
		s.files, err = e.p.Files.Make(gctx, s.id, cfg)
		return err
	})
	g.Go(func() error {
		var err error
		instance, err = e.startShim(gctx, s)
		return err
	})
	err = g.Wait()
	if err != nil {
		return err
	}
	// Shown, not yet written: the commit writes it, and until then the record that is on
	// disk is enough to undo everything.
	next := proto.CloneOf(s.rec.Load())
	next.NetnsPath = s.namespaces["network"]
	next.Namespaces = s.namespaces
	next.Ips, next.CniResult = attached.IPs, attached.Raw
	next.Pid = instance.Pid
	s.rec.Store(next)
	return nil
}

func (e *Engine) pin(ctx context.Context, id string, want PinRequest) (map[string]string, error) {
	ctx, span := e.tracer.Start(ctx, "sandboxd.pin_namespaces")
	defer span.End()
	return e.p.Namespaces.Pin(ctx, id, want)
}

func (e *Engine) attach(ctx context.Context, s *sandbox) (pod.NetworkResult, error) {
	return e.p.Network.Attach(ctx, e.networkRequest(s))
}

func (e *Engine) networkRequest(s *sandbox) pod.NetworkRequest {
	rec := s.rec.Load()
	path := s.namespaces["network"]
	if path == "" {
		path = rec.GetNetnsPath()
	}
	return pod.NetworkRequest{SandboxID: s.id, Config: rec.GetConfig(), NetnsPath: path, Handler: s.handler.Name}
}

func (e *Engine) startShim(ctx context.Context, s *sandbox) (Instance, error) {
	ctx, span := e.tracer.Start(ctx, "sandboxd.start_shim")
	defer span.End()
	cfg := s.rec.Load().GetConfig()
	spec := SandboxSpec{ID: s.id, Handler: s.handler, Config: cfg, Namespaces: s.namespaces}
	if sharedPID(cfg) {
		init, err := e.p.Specs.Init(SpecInput{SandboxID: s.id, Sandbox: cfg, Handler: s.handler, Namespaces: s.namespaces})
		if err != nil {
			return Instance{}, err
		}
		spec.Init, err = json.Marshal(init)
		if err != nil {
			return Instance{}, err
		}
	}
	err := e.p.Controller.Create(ctx, spec)
	if err != nil {
		return Instance{}, err
	}
	return e.p.Controller.Start(ctx, s.id)
}

// sharedPID says whether the pod's containers share one PID namespace of their own.
func sharedPID(cfg *criv1.PodSandboxConfig) bool {
	return cfg.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() == criv1.NamespaceMode_POD &&
		cfg.GetLinux().GetSecurityContext().GetNamespaceOptions() != nil
}

// CommitSandbox makes a prepared sandbox READY and visible.
func (e *Engine) CommitSandbox(ctx context.Context, id string) error {
	err := e.ready()
	if err != nil {
		return err
	}
	s, err := e.sandbox(id)
	if err != nil {
		return preparationLost(err)
	}
	done, err := s.turn.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	switch s.rec.Load().GetState() {
	case sandboxReady:
		return nil
	case sandboxPreparing:
		if s.doomed.Load() {
			// What an earlier process prepared is known by half, and is being undone.
			return preparationLost(fmt.Errorf("sandbox %q is being undone", id))
		}
	default:
		return fmt.Errorf("sandbox %q was stopped before its commit: %w", id, errdefs.ErrFailedPrecondition)
	}
	if _, err := e.sandbox(id); err != nil { // aborted while this call waited for its turn
		return preparationLost(err)
	}
	ev, err := event(ctx, TopicSandboxStart, "start-"+id, false, &events.SandboxStart{SandboxID: id})
	if err != nil {
		return err
	}
	err = e.saveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.State = sandboxReady }, ev)
	if err != nil {
		return err
	}
	e.watchSandbox(s)
	return nil
}

// preparationLost is the error of a commit of what is not known: only what was prepared is
// committed, so that a restart, or the end of the session, has undone it. Who asked for the
// object gets it by asking again.
func preparationLost(err error) error {
	return fmt.Errorf("its preparation was lost: %w: %s", errdefs.ErrUnavailable, err.Error())
}

// AbortSandbox undoes PrepareSandbox. An unknown id is not an error; a committed sandbox
// is left alone with ErrFailedPrecondition.
func (e *Engine) AbortSandbox(ctx context.Context, id string) error {
	s, err := e.sandbox(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	done, err := s.turn.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	if s.rec.Load().GetState() != sandboxPreparing {
		return fmt.Errorf("sandbox %q is committed: %w", id, errdefs.ErrFailedPrecondition)
	}
	if _, err := e.sandbox(id); err != nil {
		return nil
	}
	err = e.destroySandbox(ctx, s)
	if err != nil {
		e.doomSandbox(s)
	}
	return err
}

// doomSandbox repeats a failed undoing in the background until it succeeds: its session may
// live for weeks, and the name must become free.
func (e *Engine) doomSandbox(s *sandbox) {
	if s.doomed.CompareAndSwap(false, true) {
		e.background(func(ctx context.Context) { e.abandon(ctx, s) })
	}
}

// destroySandbox removes every part of a sandbox that was never committed, and its record.
// A network that cannot be released now is released later, from a record of its own.
func (e *Engine) destroySandbox(ctx context.Context, s *sandbox) error {
	rec := s.rec.Load()
	shimErr := e.p.Controller.Shutdown(ctx, s.id)
	var release *recordv1.NetworkRelease
	if rec.GetNetworkAttached() {
		err := e.p.Network.Detach(ctx, e.networkRequest(s), rec.GetCniResult())
		if err != nil {
			e.log.WarnContext(ctx, "network is released later", slog.String("sandbox_id", s.id), slog.Any("error", err))
			release = &recordv1.NetworkRelease{SandboxId: s.id, Config: rec.GetConfig(), NetnsPath: rec.GetNetnsPath(), CniResult: rec.GetCniResult()}
		}
	}
	err := errors.Join(shimErr, e.p.Namespaces.Unpin(ctx, s.id), e.p.Files.Remove(ctx, s.id))
	if err != nil {
		return err
	}
	err = e.p.Store.Update(ctx, func(tx *store.Tx) error {
		if release != nil {
			err := tx.PutRelease(release)
			if err != nil {
				return err
			}
		}
		return tx.DeleteSandbox(s.id)
	})
	if err != nil {
		return err
	}
	e.forgetSandbox(s, sandboxKey(rec.GetConfig().GetMetadata()))
	if release != nil {
		e.oweRelease(release)
	}
	return nil
}
