package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
)

// killTime bounds the wait for a sandbox that is asked to stop.
const killTime = 2 * time.Minute

// Quiesce refuses new containers and kills the running ones side by side. It
// returns nil records for an unknown sandbox.
func (u *UseCases) Quiesce(ctx context.Context, id string) (*recordv1.Sandbox, []*recordv1.Container, error) {
	err := u.p.Table.Ready()
	if err != nil {
		return nil, nil, err
	}
	s, err := u.p.Table.Sandbox(id)
	if errdefs.IsNotFound(err) {
		return nil, nil, nil
	}
	if s.Record().GetState() == table.SandboxPreparing {
		return nil, nil, nil
	}
	err = u.quiesce(ctx, s)
	if err != nil {
		return nil, nil, err
	}
	var recs []*recordv1.Container
	for _, c := range u.p.Table.ContainersOf(id) {
		recs = append(recs, c.Record())
	}
	return s.Record(), recs, nil
}

func (u *UseCases) quiesce(ctx context.Context, s *table.Sandbox) error {
	done, err := s.Turn.Take(ctx)
	if err != nil {
		return err
	}
	if s.Record().GetState() == table.SandboxReady {
		err = u.p.Table.SaveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.State = table.SandboxStopping })
	}
	done()
	if err != nil {
		return err
	}
	// From here on nothing new can start: creation and start check the state in their turn.
	g, gctx := errgroup.WithContext(ctx)
	for _, c := range u.p.Table.ContainersOf(s.ID) {
		g.Go(func() error {
			if c.Record().GetState() == table.ContainerPreparing {
				err := u.p.Containers.Abort(gctx, c.ID)
				if !errdefs.IsFailedPrecondition(err) {
					return err
				} // committed meanwhile: stop it like the others
			}
			return u.p.Driver.Stop(gctx, c, 0)
		})
	}
	return g.Wait()
}

// Stop tears the sandbox down to a NOTREADY record. It may be called any number of
// times; a failed teardown is reported and done again by the next call.
func (u *UseCases) Stop(ctx context.Context, id string) error {
	err := u.p.Table.Ready()
	if err != nil {
		return err
	}
	s, err := u.p.Table.Sandbox(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if s.Record().GetState() == table.SandboxPreparing {
		err := u.Abort(ctx, id)
		if !errdefs.IsFailedPrecondition(err) {
			return err
		} // committed meanwhile
	}
	err = u.quiesce(ctx, s)
	if err != nil {
		return fmt.Errorf("stop sandbox %q: %w", id, err)
	}
	done, err := s.Turn.Take(ctx)
	if err != nil {
		return err
	}
	defer done()
	return u.teardown(ctx, s)
}

// teardown releases what a stopped sandbox must not hold. The caller has the turn.
func (u *UseCases) teardown(ctx context.Context, s *table.Sandbox) error {
	rec := s.Record()
	if rec.GetState() == table.SandboxStopped {
		return nil
	}
	shim := make(chan error, 1)
	go func() { shim <- u.shutdownShim(ctx, s.ID) }()
	var netErr error
	if rec.GetNetworkAttached() {
		netErr = u.p.Network.Detach(ctx, u.networkRequest(s), rec.GetCniResult())
		if netErr != nil {
			netErr = fmt.Errorf("detach network: %w", netErr)
		}
	}
	err := errors.Join(netErr, <-shim, u.clearInit(ctx, s))
	if err != nil {
		return fmt.Errorf("stop sandbox %q: %w", s.ID, err)
	}
	err = errors.Join(u.p.Namespaces.Unpin(ctx, s.ID), u.p.ImageVolumes.Release(ctx, s.ID, ""))
	if err != nil {
		return fmt.Errorf("stop sandbox %q: %w", s.ID, err)
	}
	ev, err := event.SandboxExit(ctx, s.ID, 0, time.Now())
	if err != nil {
		return err
	}
	return u.p.Table.SaveSandbox(ctx, s, func(r *recordv1.Sandbox) {
		r.State = table.SandboxStopped
		r.NetworkAttached = false
		if r.GetExitedAt() == nil {
			r.ExitedAt = timestamppb.Now()
		}
	}, ev)
}

// clearInit ends a pod's own process and removes what is left of it. Its shim has done so already,
// unless it died or its bundle was lost.
func (u *UseCases) clearInit(ctx context.Context, s *table.Sandbox) error {
	cfg := s.Record().GetConfig()
	if !sharedPID(cfg) {
		return nil
	}
	init, err := u.p.Specs.Init(port.SpecInput{SandboxID: s.ID, Sandbox: cfg, Handler: s.Handler, Namespaces: s.Namespaces})
	if err != nil || init.Linux == nil {
		return nil //nolint:nilerr // what cannot be described was not started
	}
	return u.p.Tasks.Clear(ctx, s.Handler, s.ID, init.Linux.CgroupsPath)
}

func (u *UseCases) shutdownShim(ctx context.Context, id string) error {
	u.p.Driver.AwaitDeletions(ctx, id)
	err := u.p.Controller.Stop(ctx, id, killTime)
	if err != nil && !errdefs.IsNotFound(err) {
		u.p.Log.WarnContext(ctx, "sandbox does not stop in order", slog.String("sandbox_id", id), slog.Any("error", err))
	}
	err = u.p.Controller.Shutdown(ctx, id)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("shut down shim: %w", err)
	}
	return nil
}

// Remove removes the sandbox with all its containers.
func (u *UseCases) Remove(ctx context.Context, id string) error {
	err := u.Stop(ctx, id)
	if err != nil {
		return err
	}
	s, err := u.p.Table.Sandbox(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, c := range u.p.Table.ContainersOf(id) {
		g.Go(func() error {
			_, err := u.p.Containers.Remove(gctx, c.ID)
			return err
		})
	}
	err = g.Wait()
	if err != nil {
		return fmt.Errorf("remove sandbox %q: %w", id, err)
	}
	done, err := s.Turn.Take(ctx)
	if err != nil {
		return err
	}
	defer done()
	if _, err := u.p.Table.Sandbox(id); errdefs.IsNotFound(err) {
		return nil // removed by a call that had its turn before
	}
	err = u.p.Files.Remove(ctx, id)
	if err != nil {
		return fmt.Errorf("remove sandbox %q: %w", id, err)
	}
	ev, err := event.SandboxDelete(ctx, id)
	if err != nil {
		return err
	}
	err = u.p.Table.DropSandbox(ctx, s, nil, ev)
	if err != nil {
		return fmt.Errorf("remove sandbox %q: %w", id, err)
	}
	u.p.Specs.FreeLabel(s.Record().GetSelinuxLabel())
	return nil
}

// watch marks a sandbox whose shim or init process ended without being asked to.
func (u *UseCases) watch(s *table.Sandbox) {
	u.p.Work.Go(func(ctx context.Context) {
		exit, err := u.p.Controller.Wait(ctx, s.ID)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !errdefs.IsNotFound(err) {
			u.p.Log.WarnContext(ctx, "sandbox cannot be watched", slog.String("sandbox_id", s.ID), slog.Any("error", err))
			return
		}
		if s.Record().GetState() != table.SandboxReady {
			return
		}
		at := exit.At
		if at.IsZero() {
			at = time.Now()
		}
		ev, err := event.SandboxExit(ctx, s.ID, exit.Code, at)
		if err == nil {
			err = u.p.Table.SaveSandbox(ctx, s, func(r *recordv1.Sandbox) { r.ExitedAt = timestamppb.New(at) }, ev)
		}
		if err != nil {
			u.p.Log.ErrorContext(ctx, "end of a sandbox cannot be recorded", slog.String("sandbox_id", s.ID), slog.Any("error", err))
			return
		}
		u.p.Log.WarnContext(ctx, "sandbox ended by itself", slog.String("sandbox_id", s.ID))
	})
}
