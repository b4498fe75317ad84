// Package sandbox holds the use cases for sandboxes: preparing, committing and aborting them,
// stopping and removing them with all that is in them, and noticing when one ends by itself.
//
// A sandbox that is prepared has a durable record, because an address must be released
// whatever happens, and is in no list. A network that cannot be released is owed: the
// release is a record of its own and repeated until it succeeds.
package sandbox

import (
	"log/slog"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/container"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/prepared"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/task"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/view"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// Parts are what the use cases work with. All must be set.
type Parts struct {
	Table        *table.Table
	Work         *work.Group
	Driver       *task.Driver
	Containers   *container.UseCases
	Views        *view.Views
	Network      port.Network
	Namespaces   port.Namespaces
	Files        port.Files
	Controller   port.Controller
	ImageVolumes port.ImageVolumes
	Specs        port.Specs
	Tasks        port.Tasks
	Handler      func(name string) (pod.Handler, error)
	// BootID is of the running kernel; records of another one are of before a reboot.
	BootID string
	Log    *slog.Logger
	Tracer trace.Tracer
}

// UseCases are the operations on sandboxes. Its methods are safe for concurrent use.
type UseCases struct {
	p        Parts
	prepared prepared.Kind[*table.Sandbox]
	releases *semaphore.Weighted
}

// New returns the use cases.
func New(p Parts) *UseCases {
	u := &UseCases{p: p, releases: semaphore.NewWeighted(releasing)}
	u.prepared = prepared.Kind[*table.Sandbox]{
		Name: "sandbox", Find: p.Table.Sandbox, Destroy: u.destroy, Table: p.Table, Work: p.Work, Log: p.Log,
	}
	return u
}
