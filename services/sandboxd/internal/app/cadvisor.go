package app

import (
	"context"
	"log/slog"
	"time"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/buildinfo"
	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/rpc"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/cadvisor"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/ocispec/resource"
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
		cadvisor.Services(cadvisorRecords{Views: a.engine.Views, engine: a.engine, systemd: systemdCgroup(a.cfg)}, build.Version, build.Commit),
		rpc.WithoutDeadlineFloor(),
	)...)
	return err
}

func (a *App) cadvisorPart() lifecycle.Part {
	part := a.cadvisor.Part("cadvisor")
	part.Run = func(ctx context.Context, ready func()) error {
		lis, err := cadvisor.Listen(ctx, a.cfg.CAdvisor.Socket)
		if err != nil {
			return err
		}
		a.tel.Log.InfoContext(ctx, "cAdvisor is answered", slog.String("address", lis.Addr().String()))
		ready()
		return a.cadvisor.Serve(ctx, lis)
	}
	return part
}
