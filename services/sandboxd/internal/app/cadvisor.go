package app

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/cadvisor"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup"
)

// cadvisorRecords fits the engine to package cadvisor.
type cadvisorRecords struct {
	*view.Views

	engine  *engine.Engine
	systemd bool
}

var _ cadvisor.Records = cadvisorRecords{}

// Known implements cadvisor.Records.
func (r cadvisorRecords) Known() <-chan struct{} { return r.engine.RecoveredC() }

// Sandbox implements cadvisor.Records.
func (r cadvisorRecords) Sandbox(id string) (*recordv1.Sandbox, error) { return r.SandboxInMaking(id) }

// CgroupsPath implements cadvisor.Records.
func (r cadvisorRecords) CgroupsPath(rec *recordv1.Sandbox) string {
	return resource.CgroupsPath(rec.GetConfig().GetLinux().GetCgroupParent(), rec.GetId(), r.systemd)
}

// cadvisorGroups fits the cgroups to package cadvisor.
type cadvisorGroups struct{}

var _ cadvisor.Cgroups = cadvisorGroups{}

// Make implements cadvisor.Cgroups.
func (cadvisorGroups) Make(id, cgroupsPath string) error {
	_, err := cgroup.Make(id, cgroupsPath)
	return err
}

// Remove implements cadvisor.Cgroups.
func (cadvisorGroups) Remove(id, cgroupsPath string) error {
	group, err := cgroup.Find(id, cgroupsPath)
	if err != nil {
		return err
	}
	return group.Remove()
}

func (a *App) cadvisorRecords() cadvisorRecords {
	return cadvisorRecords{Views: a.engine.Views, engine: a.engine, systemd: systemdCgroup(a.cfg)}
}

// buildCAdvisor builds the server that answers cAdvisor, if there is to be one.
func (a *App) buildCAdvisor() error {
	if a.cfg.CAdvisor.Socket == "" {
		return nil
	}
	build := buildinfo.Read()
	cfg := rpc.DefaultServerConfig(a.cfg.CAdvisor.Socket)
	cfg.DrainTimeout = config.Duration(time.Second) // what waits for the recovery waits in vain
	var err error
	a.cadvisor, err = rpc.NewServer(cfg, a.tel, append(
		cadvisor.Services(a.cadvisorRecords(), build.Version, build.Commit), rpc.WithoutDeadlineFloor(),
	)...)
	return err
}

// cadvisorParts are the server and, after it, the groups that make cAdvisor ask.
func (a *App) cadvisorParts() []lifecycle.Part {
	server := a.cadvisor.Part("cadvisor")
	serve := server.Run
	server.Run = func(ctx context.Context, ready func()) error {
		err := serve(ctx, ready)
		if errdefs.IsAlreadyExists(err) {
			return fmt.Errorf("%w; cadvisor.socket is for nodes without containerd: stop what listens there, or unset the key", err)
		}
		return err
	}
	groups := cadvisor.NewGroups(a.cadvisorRecords(), cadvisorGroups{}, a.tel.Log)
	return []lifecycle.Part{server, {Name: "cadvisor-groups", Run: groups.Run}}
}
