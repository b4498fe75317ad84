package engine

import (
	"context"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/capture"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/container"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/event"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/exec"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/sandbox"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/task"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Ports are the outside things that the engine works with. All must be set.
type Ports struct {
	Store  *store.Store
	Images port.Images
	Rootfs port.Rootfs
	// ImageVolumes mounts images as volumes.
	ImageVolumes port.ImageVolumes
	Network      port.Network
	Namespaces   port.Namespaces
	Files        port.Files
	Controller   port.Controller
	Tasks        port.Tasks
	IO           port.IO
	Specs        port.Specs
	Programs     port.Programs
	Cgroups      port.Cgroups
}

// Config are the engine's values.
type Config struct {
	// Handler finds a runtime handler by its name, as pod.Handlers does. What it finds may change
	// while the engine works; pods that are there keep theirs.
	Handler func(name string) (pod.Handler, error)
	// BootID of the running kernel; records of another one are of before a reboot.
	BootID string
	// SessionGrace is how long a lost gateway session may take to come back before what it
	// prepared is aborted.
	SessionGrace time.Duration
	// ContainerDir is the folder under which a container's volumes live.
	ContainerDir string
	// Ended, if set, is told the reason of each end of a container, once it is recorded.
	Ended func(reason string)
}

// Engine is the use cases put together. Everything in it is safe for concurrent use.
type Engine struct {
	Sandboxes  *sandbox.UseCases
	Containers *container.UseCases
	Tasks      *task.Driver
	Exec       *exec.Runner
	Capture    *capture.Capturer
	Views      *view.Views

	cfg   Config
	p     Ports
	table *table.Table
	work  *work.Group
	log   *slog.Logger
}

// New returns an engine without objects. Call Recover before anything else.
func New(ctx context.Context, cfg Config, p Ports, log *slog.Logger, tracer trace.Tracer) *Engine {
	e := &Engine{cfg: cfg, p: p, log: log, table: table.New(p.Store), work: work.New(ctx, log)}
	e.Views = view.New(view.Parts{Table: e.table, Specs: p.Specs, Controller: p.Controller})
	e.Exec = exec.New(exec.Parts{Table: e.table, Work: e.work, Tasks: p.Tasks, IO: p.IO, Specs: p.Specs, Programs: p.Programs, Log: log})
	e.Tasks = task.New(task.Parts{
		Table: e.table, Work: e.work, Tasks: p.Tasks, IO: p.IO, Rootfs: p.Rootfs, Programs: p.Programs, Cgroups: p.Cgroups,
		BootID: cfg.BootID, ContainerDir: cfg.ContainerDir, Ended: cfg.Ended, Log: log, Tracer: tracer,
	})
	e.Containers = container.New(container.Parts{
		Table: e.table, Work: e.work, Driver: e.Tasks, Views: e.Views, Images: p.Images, Rootfs: p.Rootfs,
		ImageVolumes: p.ImageVolumes, Tasks: p.Tasks, Specs: p.Specs, Files: p.Files, Cgroups: p.Cgroups, ContainerDir: cfg.ContainerDir, Log: log,
	})
	e.Sandboxes = sandbox.New(sandbox.Parts{
		Table: e.table, Work: e.work, Driver: e.Tasks, Containers: e.Containers, Views: e.Views, Network: p.Network,
		Namespaces: p.Namespaces, Files: p.Files, Controller: p.Controller, ImageVolumes: p.ImageVolumes, Specs: p.Specs,
		Tasks: p.Tasks, Handler: cfg.Handler, BootID: cfg.BootID, Log: log, Tracer: tracer,
	})
	e.Capture = capture.New(capture.Parts{
		Table: e.table, Work: e.work, Tasks: p.Tasks, Rootfs: p.Rootfs, Images: p.Images, Handler: cfg.Handler,
		ContainerDir: cfg.ContainerDir, Log: log,
	})
	return e
}

// Close ends the background work and waits for it. Containers are not touched.
func (e *Engine) Close() { e.work.Close() }

// Recovered reports whether the state is complete.
func (e *Engine) Recovered() bool { return e.table.Ready() == nil }

// RecoveredC is closed once the state is complete.
func (e *Engine) RecoveredC() <-chan struct{} { return e.table.Complete() }

// Publish puts an event that belongs to no record of the engine into the outbox.
func (e *Engine) Publish(ctx context.Context, topic string, payload proto.Message) {
	ev, err := event.New(ctx, topic, table.NewID(), false, payload)
	if err == nil {
		err = e.table.Append(ctx, ev)
	}
	if err != nil {
		e.log.WarnContext(ctx, "event is lost", slog.String("topic", topic), slog.Any("error", err))
	}
}
