package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/containerd/api/events"
	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// killTime bounds the wait for a killed container's end.
const killTime = 2 * time.Minute

// QuiesceSandbox refuses new containers and kills the running ones side by side. It
// returns nil records for an unknown sandbox.
func (e *Engine) QuiesceSandbox(ctx context.Context, id string) (*recordv1.Sandbox, []*recordv1.Container, error) {
	err := e.ready()
	if err != nil {
		return nil, nil, err
	}
	s, err := e.sandbox(id)
	if errdefs.IsNotFound(err) {
		return nil, nil, nil
	}
	if s.rec.Load().GetState() == sandboxPreparing {
		return nil, nil, nil
	}
	err = e.quiesce(ctx, s)
	if err != nil {
		return nil, nil, err
	}
	var recs []*recordv1.Container
	for _, c := range e.containersOf(id) {
		recs = append(recs, c.rec.Load())
	}
	return s.rec.Load(), recs, nil
}

func (e *Engine) quiesce(ctx context.Context, s *sandbox) error {
	done, err := s.turn.take(ctx)
	if err != nil {
		return err
	}
	if s.rec.Load().GetState() == sandboxReady {
		err = e.saveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.State = sandboxStopping })
	}
	done()
	if err != nil {
		return err
	}
	// From here on nothing new can start: creation and start check the state in their turn.
	g, gctx := errgroup.WithContext(ctx)
	for _, c := range e.containersOf(s.id) {
		g.Go(func() error {
			if c.rec.Load().GetState() == containerPreparing {
				err := e.AbortContainer(gctx, c.id)
				if !errdefs.IsFailedPrecondition(err) {
					return err
				} // committed meanwhile: stop it like the others
			}
			return e.stop(gctx, c, 0)
		})
	}
	return g.Wait()
}

// StopSandbox tears the sandbox down to a NOTREADY record. It may be called any number of
// times; a failed teardown is reported and done again by the next call.
func (e *Engine) StopSandbox(ctx context.Context, id string) error {
	err := e.ready()
	if err != nil {
		return err
	}
	s, err := e.sandbox(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if s.rec.Load().GetState() == sandboxPreparing {
		err := e.AbortSandbox(ctx, id)
		if !errdefs.IsFailedPrecondition(err) {
			return err
		} // committed meanwhile
	}
	err = e.quiesce(ctx, s)
	if err != nil {
		return fmt.Errorf("stop sandbox %q: %w", id, err)
	}
	done, err := s.turn.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	return e.teardown(ctx, s)
}

// teardown releases what a stopped sandbox must not hold. The caller has the turn.
func (e *Engine) teardown(ctx context.Context, s *sandbox) error {
	rec := s.rec.Load()
	if rec.GetState() == sandboxStopped {
		return nil
	}
	shim := make(chan error, 1)
	go func() { shim <- e.shutdownShim(ctx, s.id) }()
	var netErr error
	if rec.GetNetworkAttached() {
		netErr = e.p.Network.Detach(ctx, e.networkRequest(s), rec.GetCniResult())
		if netErr != nil {
			netErr = fmt.Errorf("detach network: %w", netErr)
		}
	}
	err := errors.Join(netErr, <-shim, e.clearInit(ctx, s))
	if err != nil {
		return fmt.Errorf("stop sandbox %q: %w", s.id, err)
	}
	err = errors.Join(e.p.Namespaces.Unpin(ctx, s.id), e.p.ImageVolumes.Release(ctx, s.id, ""))
	if err != nil {
		return fmt.Errorf("stop sandbox %q: %w", s.id, err)
	}
	ev, err := event(ctx, TopicSandboxExit, "exit-"+s.id, true, &events.SandboxExit{SandboxID: s.id, ExitedAt: timestamp(time.Now())})
	if err != nil {
		return err
	}
	return e.saveSandbox(ctx, s, func(r *recordv1.Sandbox) {
		r.State = sandboxStopped
		r.NetworkAttached = false
		if r.GetExitedAt() == nil {
			r.ExitedAt = timestamp(time.Now())
		}
	}, ev)
}

// clearInit ends a pod's own process, whose shim has done so already unless its bundle was
// lost.
func (e *Engine) clearInit(ctx context.Context, s *sandbox) error {
	cfg := s.rec.Load().GetConfig()
	if !sharedPID(cfg) {
		return nil
	}
	init, err := e.p.Specs.Init(SpecInput{SandboxID: s.id, Sandbox: cfg, Handler: s.handler, Namespaces: s.namespaces})
	if err != nil || init.Linux == nil {
		return nil //nolint:nilerr // what cannot be described was not started
	}
	err = e.p.Cgroups.Clear(ctx, s.id, init.Linux.CgroupsPath)
	if err != nil {
		return fmt.Errorf("clear cgroup: %w", err)
	}
	return nil
}

func (e *Engine) shutdownShim(ctx context.Context, id string) error {
	e.awaitDeletions(ctx, id)
	err := e.p.Controller.Stop(ctx, id, killTime)
	if err != nil && !errdefs.IsNotFound(err) {
		e.log.WarnContext(ctx, "sandbox does not stop in order", slog.String("sandbox_id", id), slog.Any("error", err))
	}
	err = e.p.Controller.Shutdown(ctx, id)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("shut down shim: %w", err)
	}
	return nil
}

// RemoveSandbox removes the sandbox with all its containers.
func (e *Engine) RemoveSandbox(ctx context.Context, id string) error {
	err := e.StopSandbox(ctx, id)
	if err != nil {
		return err
	}
	s, err := e.sandbox(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, c := range e.containersOf(id) {
		g.Go(func() error {
			_, err := e.RemoveContainer(gctx, c.id)
			return err
		})
	}
	err = g.Wait()
	if err != nil {
		return fmt.Errorf("remove sandbox %q: %w", id, err)
	}
	done, err := s.turn.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	if _, err := e.sandbox(id); errdefs.IsNotFound(err) {
		return nil // removed by a call that had its turn before
	}
	err = e.p.Files.Remove(ctx, id)
	if err != nil {
		return fmt.Errorf("remove sandbox %q: %w", id, err)
	}
	ev, err := event(ctx, TopicSandboxDelete, "delete-"+id, true, &eventv1.SandboxDelete{SandboxId: id})
	if err != nil {
		return err
	}
	err = e.p.Store.Update(ctx, func(tx *store.Tx) error {
		err := tx.DeleteSandbox(id)
		if err != nil {
			return err
		}
		return appendEvents(tx, ev)
	})
	if err != nil {
		return fmt.Errorf("remove sandbox %q: %w", id, err)
	}
	e.forgetSandbox(s, sandboxKey(s.rec.Load().GetConfig().GetMetadata()))
	return nil
}

// watchSandbox marks a sandbox whose shim or init process ended without being asked to.
func (e *Engine) watchSandbox(s *sandbox) {
	e.background(func(ctx context.Context) {
		exit, err := e.p.Controller.Wait(ctx, s.id)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !errdefs.IsNotFound(err) {
			e.log.WarnContext(ctx, "sandbox cannot be watched", slog.String("sandbox_id", s.id), slog.Any("error", err))
			return
		}
		if s.rec.Load().GetState() != sandboxReady {
			return
		}
		at := exit.At
		if at.IsZero() {
			at = time.Now()
		}
		ev, err := event(ctx, TopicSandboxExit, "exit-"+s.id, true,
			&events.SandboxExit{SandboxID: s.id, ExitStatus: exit.Code, ExitedAt: timestamp(at)})
		if err == nil {
			err = e.saveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.ExitedAt = timestamp(at) }, ev)
		}
		if err != nil {
			e.log.ErrorContext(ctx, "end of a sandbox cannot be recorded", slog.String("sandbox_id", s.id), slog.Any("error", err))
			return
		}
		e.log.WarnContext(ctx, "sandbox ended by itself", slog.String("sandbox_id", s.id))
	})
}
