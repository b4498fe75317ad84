package containerevents

import (
	"context"
	"time"
)

// Kind is what happened.
type Kind int

// What happens to containers and sandboxes, and Gap: events are missing here.
const (
	ContainerCreated Kind = iota + 1
	ContainerStarted
	ContainerStopped
	ContainerDeleted
	SandboxStarted
	SandboxStopped
	SandboxDeleted
	Gap
)

// Change is one event on a container or a sandbox.
type Change struct {
	Kind Kind
	// ID of the container or sandbox.
	ID string
	// SandboxID of a created container; it may be empty, and is for all other kinds.
	SandboxID string
	// At is when it happened.
	At time.Time
}

// Sink is told of changes.
type Sink interface {
	// Changed is called for each change, one after the other; an error makes the event
	// come again later, after others.
	Changed(ctx context.Context, change Change) error
}
