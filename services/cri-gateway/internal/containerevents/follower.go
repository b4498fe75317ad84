package containerevents

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// queueLength is how many events a follower may be behind.
const queueLength = 1024

// Follower gets events from Follow until Close. Copy is called once.
type Follower struct {
	feed  *Feed
	queue chan *criv1.ContainerEventResponse

	cutOnce sync.Once
	// gone is closed when the follower gets no more events; cause then says why.
	gone  chan struct{}
	cause error
}

func newFollower(f *Feed) *Follower {
	return &Follower{feed: f, queue: make(chan *criv1.ContainerEventResponse, queueLength), gone: make(chan struct{})}
}

// offer queues an event; false if the follower is too far behind and was cut off.
func (f *Follower) offer(event *criv1.ContainerEventResponse) bool {
	select {
	case f.queue <- event:
		return true
	default:
		f.cut(fmt.Errorf("%d container events were not read: %w", queueLength, errdefs.ErrResourceExhausted))
		return false
	}
}

func (f *Follower) cut(cause error) {
	f.cutOnce.Do(func() {
		f.cause = cause
		close(f.gone)
	})
}

// Copy sends events until ctx ends, the follower is cut off or send fails, and returns why.
// It returns at once when the follower is cut off, even while a send is stuck: send must
// then come back as soon as the stream behind it has ended.
func (f *Follower) Copy(ctx context.Context, send func(*criv1.ContainerEventResponse) error) error {
	if !f.feed.enter() {
		return errEnded()
	}
	failed := make(chan error, 1)
	go func() {
		defer f.feed.sending.Done()
		for {
			select {
			case event := <-f.queue:
				if err := send(event); err != nil {
					failed <- err
					return
				}
			case <-f.gone:
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	select {
	case err := <-failed:
		return err
	case <-f.gone:
		return f.cause
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close ends the following.
func (f *Follower) Close() {
	f.feed.leave(f)
	f.cut(context.Canceled)
}
