// Package progress tells how far pulls are, as events and as metrics.
package progress

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/proto"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
)

// Topic is the topic of events that say how far a pull is.
const Topic = "/images/progress"

const (
	// Interval is how often a pull is told of while it moves.
	Interval = 2 * time.Second
	// maxErrorText bounds an error in an event, in bytes.
	maxErrorText = 1 << 10
)

// Pull tells how far a pull is. Its methods may be called concurrently.
type Pull struct {
	store Store
	tell  func(ctx context.Context, e *eventv1.ImageProgress)
	image string
	id    string
	stop  context.CancelFunc
	work  sync.WaitGroup

	mu       sync.Mutex           // mu guards the rest
	blobs    []ocispec.Descriptor // the configuration, then the layers
	layers   int
	fetched  map[digest.Digest]bool
	brought  map[digest.Digest]bool // those of fetched that were not there before
	unpacked int
	last     *eventv1.ImageProgress
}

// Store knows how much of a blob has arrived.
type Store interface {
	Status(ctx context.Context, ref string) (content.Status, error)
}

// New returns the progress of a pull of an image, before its beginning. Events go to tell.
func New(image string, store Store, tell func(ctx context.Context, e *eventv1.ImageProgress)) *Pull {
	return &Pull{
		store: store, tell: tell, image: image, id: rand.Text(), stop: func() {},
		fetched: make(map[digest.Digest]bool), brought: make(map[digest.Digest]bool),
	}
}

// Begin tells of the pull now and then, once its manifest is known. It is called once.
func (p *Pull) Begin(ctx context.Context, manifest *ocispec.Manifest) {
	p.mu.Lock()
	p.blobs = append([]ocispec.Descriptor{manifest.Config}, manifest.Layers...)
	p.layers = len(manifest.Layers)
	p.mu.Unlock()
	p.publish(ctx, p.state(ctx))
	ctx, p.stop = context.WithCancel(ctx)
	p.work.Go(func() {
		tick := time.NewTicker(Interval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				p.publish(ctx, p.state(ctx))
			}
		}
	})
}

// End tells what became of the pull.
func (p *Pull) End(ctx context.Context, id string, err error) {
	p.stop()
	p.work.Wait()
	e := p.state(context.WithoutCancel(ctx))
	if err != nil {
		text := err.Error()
		e.State, e.Error = eventv1.PullState_PULL_STATE_FAILED, strings.ToValidUTF8(text[:min(len(text), maxErrorText)], "")
	} else {
		e.State, e.ImageId = eventv1.PullState_PULL_STATE_DONE, id
		e.BytesDone, e.LayersFetched, e.LayersUnpacked = e.GetBytesTotal(), e.GetLayersTotal(), e.GetLayersTotal()
	}
	p.publish(ctx, e)
}

// Arrived says that a blob is on the node, and whether this pull has brought it.
func (p *Pull) Arrived(desc ocispec.Descriptor, brought bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fetched[desc.Digest] = true
	p.brought[desc.Digest] = p.brought[desc.Digest] || brought
}

// Extracted says that a layer is unpacked. Layers are extracted upwards, so those below it,
// which may have been there before, are unpacked too.
func (p *Pull) Extracted(layer digest.Digest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := p.unpacked; i < p.layers; i++ {
		if p.blobs[i+1].Digest == layer {
			p.unpacked = i + 1
			return
		}
	}
}

// state sums up how far the pull is.
func (p *Pull) state(ctx context.Context) *eventv1.ImageProgress {
	p.mu.Lock()
	e := &eventv1.ImageProgress{
		Image: p.image, PullId: p.id, State: eventv1.PullState_PULL_STATE_RUNNING,
		LayersTotal: uint32(p.layers), LayersUnpacked: uint32(p.unpacked),
	}
	var begun []ocispec.Descriptor
	for i, b := range p.blobs {
		e.BytesTotal += uint64(max(b.Size, 0))
		switch {
		case !p.fetched[b.Digest]:
			begun = append(begun, b)
			continue
		case i > 0:
			e.LayersFetched++
		}
		e.BytesDone += uint64(max(b.Size, 0))
	}
	p.mu.Unlock()
	for _, b := range begun {
		// What is not begun yet has no status.
		if st, err := p.store.Status(ctx, remotes.MakeRefKey(ctx, b)); err == nil {
			e.BytesDone += uint64(max(st.Offset, 0))
		}
	}
	return e
}

// publish tells of a state unless it is the last one.
func (p *Pull) publish(ctx context.Context, e *eventv1.ImageProgress) {
	p.mu.Lock()
	same := proto.Equal(e, p.last)
	p.last = e
	p.mu.Unlock()
	if !same {
		p.tell(ctx, e)
	}
}
