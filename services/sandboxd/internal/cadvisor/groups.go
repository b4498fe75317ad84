package cadvisor

import (
	"context"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

// interval is how often the groups follow the pods. cAdvisor reads every ten seconds.
const interval = 2 * time.Second

// Cgroups makes and removes empty cgroups, which are named by an id and a path as a
// specification has it.
type Cgroups interface {
	// Make makes a group below a parent that is there; a group that is there is no error.
	// Errors: ErrNotFound if the parent is gone.
	Make(id, cgroupsPath string) error
	// Remove removes an empty group; one that is gone is no error.
	Remove(id, cgroupsPath string) error
}

// Groups keeps an empty cgroup for each pod that has a network but no process of its own, as
// long as something runs in it. cAdvisor finds the pod by the group, asks what it is, and reads
// the network of the process that it is told then, for as long as the group stays. So when that
// process ends and another one of the pod runs, the group is made anew.
//
// Who stops the process that Groups is part of finds no group left; those that a killed one
// left are taken over.
type Groups struct {
	records Records
	cgroups Cgroups
	log     *slog.Logger
	stands  map[string]*stand // by sandbox id
	begun   bool
}

// stand is a group and the process that stands for its pod.
type stand struct {
	path string
	pid  uint32
	// stuck says that the group could not be removed, and that this is in the log.
	stuck bool
}

// NewGroups returns the keeper.
func NewGroups(records Records, cgroups Cgroups, log *slog.Logger) *Groups {
	return &Groups{records: records, cgroups: cgroups, log: log, stands: map[string]*stand{}}
}

// Run keeps the groups until ctx ends. It may be called once.
func (g *Groups) Run(ctx context.Context, ready func()) error {
	ready()
	select {
	case <-g.records.Known():
	case <-ctx.Done():
		return nil
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if err := g.follow(ctx); err != nil {
			g.log.WarnContext(ctx, "groups for cAdvisor do not follow the pods", slog.Any("error", err))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			for id := range g.stands {
				g.remove(ctx, id)
			}
			return nil
		}
	}
}

// follow brings the groups into line with what runs.
func (g *Groups) follow(ctx context.Context) error {
	sandboxes, err := g.records.Sandboxes()
	if err != nil {
		return err
	}
	all, err := g.records.Containers("")
	if err != nil {
		return err
	}
	containers := map[string][]*recordv1.Container{}
	for _, c := range all {
		containers[c.GetSandboxId()] = append(containers[c.GetSandboxId()], c)
	}
	wanted := map[string]*stand{}
	for _, s := range sandboxes {
		if s.GetPid() != 0 || s.GetNetnsPath() == "" {
			continue // has a process, or the network of the host
		}
		path := g.records.CgroupsPath(s)
		if !g.begun {
			g.stands[s.GetId()] = &stand{path: path} // may be left from a process before
		}
		if pid := oldest(containers[s.GetId()]); pid != 0 && !ended(s) {
			wanted[s.GetId()] = &stand{path: path, pid: pid}
		}
	}
	g.begun = true
	for id, have := range g.stands {
		if want := wanted[id]; want == nil || want.pid != have.pid {
			g.remove(ctx, id)
		}
	}
	for id, want := range wanted {
		if g.stands[id] == nil {
			g.make(ctx, id, want)
		}
	}
	return nil
}

// make makes a group. One whose parent is gone is tried again as long as it is wanted: the pod is
// about to end.
func (g *Groups) make(ctx context.Context, id string, s *stand) {
	err := g.cgroups.Make(id, s.path)
	switch {
	case err == nil:
		g.stands[id] = s
	case !errdefs.IsNotFound(err):
		g.log.WarnContext(ctx, "no group for cAdvisor", slog.String("sandbox_id", id), slog.Any("error", err))
	}
}

// remove removes a group; one that cannot be removed stays known, to be tried again.
func (g *Groups) remove(ctx context.Context, id string) {
	s := g.stands[id]
	err := g.cgroups.Remove(id, s.path)
	if err == nil {
		delete(g.stands, id)
		return
	}
	if !s.stuck {
		s.stuck = true
		g.log.WarnContext(ctx, "group for cAdvisor not removed", slog.String("sandbox_id", id), slog.Any("error", err))
	}
}
