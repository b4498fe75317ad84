// Package container holds the use cases for containers: preparing, committing and aborting
// them, changing their resources, stopping and removing them.
//
// A container that is prepared has no durable record and is in no list; what it holds on
// the node is found again as an orphan after a restart. From the commit on it is shown as
// CREATED. Running it is the business of package task.
package container

import (
	"log/slog"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/prepared"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/task"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
)

// Parts are what the use cases work with. All must be set.
type Parts struct {
	Table        *table.Table
	Work         *work.Group
	Driver       *task.Driver
	Views        *view.Views
	Images       port.Images
	Rootfs       port.Rootfs
	ImageVolumes port.ImageVolumes
	Tasks        port.Tasks
	Specs        port.Specs
	Files        port.Files
	Cgroups      port.Cgroups
	// ContainerDir is the folder under which a container's volumes live.
	ContainerDir string
	Log          *slog.Logger
}

// UseCases are the operations on containers. Its methods are safe for concurrent use.
type UseCases struct {
	p        Parts
	prepared prepared.Kind[*table.Container]
}

// New returns the use cases.
func New(p Parts) *UseCases {
	u := &UseCases{p: p}
	u.prepared = prepared.Kind[*table.Container]{
		Name: "container", Find: p.Table.Container, Destroy: u.destroy, Table: p.Table, Work: p.Work, Log: p.Log,
	}
	return u
}
