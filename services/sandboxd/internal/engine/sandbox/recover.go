package sandbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Recover brings one sandbox and its containers up to date after a restart of the process,
// or of the node.
func (u *UseCases) Recover(ctx context.Context, s *table.Sandbox) {
	rec := s.Record()
	if rec.GetState() == table.SandboxPreparing {
		// Nobody can commit it any more: sessions do not outlive this process.
		u.prepared.Doom(s)
		return
	}
	rebooted := rec.GetBootId() != u.p.BootID
	alive := !rebooted && u.mayLive(ctx, s.ID)
	if rec.GetState() == table.SandboxReady && !alive && (rebooted || rec.GetExitedAt() == nil) {
		u.endSandbox(ctx, s, rebooted)
	}
	for _, c := range u.p.Table.ContainersOf(s.ID) {
		u.p.Driver.Recover(ctx, c, rebooted)
	}
	switch {
	case rebooted && s.Record().GetState() != table.SandboxStopped:
		// Addresses of before the boot are released without waiting for kubelet.
		u.p.Work.Go(func(ctx context.Context) { u.stopAfterReboot(ctx, s) })
	case alive && s.Record().GetState() == table.SandboxReady:
		u.watch(s)
	}
}

// stopAfterReboot stops a sandbox of before the reboot once the state is complete, until
// it succeeds.
func (u *UseCases) stopAfterReboot(ctx context.Context, s *table.Sandbox) {
	select {
	case <-u.p.Table.Complete():
	case <-ctx.Done():
		return
	}
	u.p.Work.Insist(ctx, "stop sandbox of before the reboot", slog.String("sandbox_id", s.ID), func(ctx context.Context) error {
		return u.Stop(ctx, s.ID)
	})
}

// mayLive says whether a sandbox lives or does not answer for now; the latter's end shows
// when it is watched.
func (u *UseCases) mayLive(ctx context.Context, id string) bool {
	st, err := u.p.Controller.Status(ctx, id, false)
	if err != nil {
		return !errdefs.IsNotFound(err)
	}
	return st.Alive || st.ExitedAt.IsZero()
}

// endSandbox notes the end of a sandbox that ended unseen.
func (u *UseCases) endSandbox(ctx context.Context, s *table.Sandbox, rebooted bool) {
	end := func(r *recordv1.Sandbox) {
		if rebooted {
			r.State = table.SandboxStopping
		}
		if r.GetExitedAt() == nil {
			r.ExitedAt = timestamppb.Now()
		}
	}
	ev, err := event.SandboxExit(ctx, s.ID, pod.ExitCodeUnknown, time.Now())
	if err == nil {
		err = u.p.Table.SaveSandbox(ctx, s, end, ev)
	}
	if err != nil {
		u.p.Log.WarnContext(ctx, "end of a sandbox cannot be recorded", slog.String("sandbox_id", s.ID), slog.Any("error", err))
		next := proto.CloneOf(s.Record())
		end(next)
		s.Show(next)
	}
}
