// Package exec runs further processes in running containers, and connects clients to the
// processes that run.
//
// An exec ends with its process, its time limit or its caller's context, whichever is
// first; nothing of it stays in the shim. Its output is delivered before its exit code.
package exec

import (
	"log/slog"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/table"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/work"
)

// Parts are what a Runner works with. All must be set.
type Parts struct {
	Table    *table.Table
	Work     *work.Group
	Tasks    port.Tasks
	IO       port.IO
	Specs    port.Specs
	Programs port.Programs
	Log      *slog.Logger
}

// Runner runs and connects. Its methods are safe for concurrent use.
type Runner struct{ p Parts }

// New returns a runner.
func New(p Parts) *Runner { return &Runner{p} }
