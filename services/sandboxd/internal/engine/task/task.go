// Package task drives the tasks of containers: it starts the process of a CREATED container,
// follows it until its end, records the end, and stops it when asked.
//
// Each container has a follower of its own, from before the start until its task is
// deleted; an end is recorded once, together with its event, however it was found out. A
// start that fails leaves nothing that runs. Making and removing containers is not done
// here.
package task

import (
	"log/slog"

	"go.opentelemetry.io/otel/trace"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
)

// Parts are what a Driver works with. All must be set.
type Parts struct {
	Table    *table.Table
	Work     *work.Group
	Tasks    port.Tasks
	IO       port.IO
	Rootfs   port.Rootfs
	Programs port.Programs
	Cgroups  port.Cgroups
	// BootID is of the running kernel.
	BootID string
	// ContainerDir is the folder under which a container's volumes live.
	ContainerDir string
	// Ended, if set, is told the reason of each recorded end.
	Ended  func(reason string)
	Log    *slog.Logger
	Tracer trace.Tracer
}

// Driver drives tasks. Its methods are safe for concurrent use.
type Driver struct{ p Parts }

// New returns a driver.
func New(p Parts) *Driver { return &Driver{p} }
