package call

import (
	"context"
	"errors"
	"log/slog"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Nurse brings a degraded plugin back: after a pause it delivers what was kept for it, in
// order, and makes it active again when nothing is left. The oldest kept event is the
// probe; at another timeout the pause doubles. It returns when the plugin is active or
// disconnected, or ctx has ended.
func (c *Caller) Nurse(ctx context.Context, m *member.Member) {
	for {
		if !c.rest(ctx, m, m.Pause()) || c.treat(ctx, m) {
			return
		}
		m.Worsen(c.cfg.MaxPause)
	}
}

// rest waits, and reports false if the plugin is disconnected or ctx has ended.
func (c *Caller) rest(ctx context.Context, m *member.Member, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-m.Plugin.Done():
		return false
	case <-ctx.Done():
		return false
	}
}

// treat delivers what is kept. It reports false if the plugin did not answer again.
func (c *Caller) treat(ctx context.Context, m *member.Member) (done bool) {
	for {
		e, ok := m.Next()
		if !ok {
			if m.Recovers() {
				c.parts.Log.InfoContext(ctx, "plugin answers again", slog.String("plugin", m.Info.ID.String()))
				c.parts.Roster.Moved()
				return true
			}
			select {
			case <-m.Stirred():
				continue
			case <-m.Plugin.Done():
				return true
			case <-ctx.Done():
				return true
			}
		}
		w, err := c.Deliver(ctx, m, e, nil)
		c.parts.Outward.CarryOut(ctx, m, w)
		switch {
		case err == nil:
		case errors.Is(err, ErrTimeout):
			return false
		case errors.Is(err, plug.ErrLost) || ctx.Err() != nil:
			return true
		}
	}
}

// Deliver tells a plugin of a kept event. The returned wish is what can still be done of
// the answer, for which the request is no way any more.
func (c *Caller) Deliver(ctx context.Context, m *member.Member, e member.Event, found map[string]bool) (member.Wish, error) {
	if !replayable(m, e, found) {
		return member.Wish{}, nil
	}
	begin := time.Now()
	resp, _, err := c.Call(ctx, m, e.Kind, e.Req, 0, nil)
	if err != nil {
		c.parts.Log.WarnContext(ctx, "plugin failed an event that was kept for it",
			slog.String("plugin", m.Info.ID.String()), slog.String("event", e.Kind.PrettyName()), slog.Any("error", err))
		return member.Wish{}, err
	}
	w, partly := lateWish(e, resp)
	if partly {
		c.parts.Log.WarnContext(ctx, "adjustment came too late for a container that was created without the plugin",
			slog.String("plugin", m.Info.ID.String()), slog.String("container_id", e.Container), slog.Duration("took", time.Since(begin)))
	}
	return w, nil
}

// replayable reports whether the plugin is to be told of a kept event: it needs no
// creation of what it was synchronised with, and no end of what it never knew.
func replayable(m *member.Member, e member.Event, found map[string]bool) bool {
	switch e.Kind {
	case nri.Event_RUN_POD_SANDBOX:
		if found[e.Pod] {
			return false
		}
		m.Learn(e.Pod, object.Known)
	case nri.Event_CREATE_CONTAINER:
		if found[e.Container] {
			return false
		}
		m.Learn(e.Container, object.Known)
	case nri.Event_STOP_POD_SANDBOX:
		return m.StageOf(e.Pod) != 0 && m.ClaimStop(e.Pod)
	case nri.Event_REMOVE_POD_SANDBOX:
		return m.StageOf(e.Pod) != 0 && m.ClaimRemoval(e.Pod)
	case nri.Event_STOP_CONTAINER:
		return m.StageOf(e.Container) != 0 && m.ClaimStop(e.Container)
	case nri.Event_REMOVE_CONTAINER:
		return m.StageOf(e.Container) != 0 && m.ClaimRemoval(e.Container)
	default:
		return m.StageOf(e.Container) != 0 || m.StageOf(e.Pod) != 0
	}
	return true
}

// lateWish turns an answer that came after its request into what can still be done.
// partly says that there is more in the answer than that.
func lateWish(e member.Event, resp any) (w member.Wish, partly bool) {
	switch r := resp.(type) {
	case *nri.CreateContainerResponse:
		w = member.Wish{Updates: r.GetUpdate(), Evictions: r.GetEvict()}
		if res := r.GetAdjust().GetLinux().GetResources(); res != nil {
			w.Updates = append(w.Updates, &nri.ContainerUpdate{
				ContainerId: e.Container,
				Linux:       &nri.LinuxContainerUpdate{Resources: res},
			})
		}
		partly = r.GetAdjust().Strip() != nil
	case *nri.UpdateContainerResponse:
		w = member.Wish{Updates: r.GetUpdate(), Evictions: r.GetEvict()}
	case *nri.StopContainerResponse:
		w = member.Wish{Updates: r.GetUpdate()}
	}
	return w, partly
}
