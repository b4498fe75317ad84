package containerevents

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
)

// None stands for the feed where there is no bus.
type None struct{}

// Follow always fails with FailedPrecondition.
func (None) Follow(context.Context) (*Follower, error) {
	return nil, fmt.Errorf("container events come over the bus, and none is configured (events.url): %w", errdefs.ErrFailedPrecondition)
}
