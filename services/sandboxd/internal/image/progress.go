package image

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/decode"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/extract"
)

// TopicProgress is the topic of events that say how far a pull is.
const TopicProgress = "/images/progress"

const (
	// progressInterval is how often a pull is told of while it moves.
	progressInterval = 2 * time.Second
	// maxErrorText bounds an error in an event, in bytes.
	maxErrorText = 1 << 10
)

// progress tells how far a pull is. Its methods may be called concurrently.
type progress struct {
	s     *Service
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

func (s *Service) newProgress(name reference.Named) *progress {
	return &progress{s: s, image: name.String(), id: rand.Text(), stop: func() {}, fetched: make(map[digest.Digest]bool), brought: make(map[digest.Digest]bool)}
}

// begin tells of the pull now and then, once its manifest is known. It is called once.
func (p *progress) begin(ctx context.Context, manifest *ocispec.Manifest) {
	p.mu.Lock()
	p.blobs = append([]ocispec.Descriptor{manifest.Config}, manifest.Layers...)
	p.layers = len(manifest.Layers)
	p.mu.Unlock()
	p.tell(ctx, p.state(ctx))
	ctx, p.stop = context.WithCancel(ctx)
	p.work.Go(func() {
		tick := time.NewTicker(progressInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				p.tell(ctx, p.state(ctx))
			}
		}
	})
}

// end tells what became of the pull.
func (p *progress) end(ctx context.Context, id string, err error) {
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
	p.tell(ctx, e)
}

// arrived says that a blob is on the node, and whether this pull has brought it.
func (p *progress) arrived(desc ocispec.Descriptor, brought bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fetched[desc.Digest] = true
	p.brought[desc.Digest] = p.brought[desc.Digest] || brought
}

// extracted says that a layer is unpacked. Layers are extracted upwards, so those below it,
// which may have been there before, are unpacked too.
func (p *progress) extracted(layer digest.Digest) {
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
func (p *progress) state(ctx context.Context) *eventv1.ImageProgress {
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
		if st, err := p.s.st.Content().Status(ctx, remotes.MakeRefKey(ctx, b)); err == nil {
			e.BytesDone += uint64(max(st.Offset, 0))
		}
	}
	return e
}

// tell publishes a state unless it is the last one.
func (p *progress) tell(ctx context.Context, e *eventv1.ImageProgress) {
	p.mu.Lock()
	same := proto.Equal(e, p.last)
	p.last = e
	p.mu.Unlock()
	if !same {
		p.s.tell(ctx, TopicProgress, e)
	}
}

// extractor returns what extracts layers as they are configured to be decoded, and calls done
// after each.
func (s *Service) extractor(done func(layer digest.Digest)) applier {
	conf := s.conf.Load()
	decoding := conf.Decode
	decoding.Patience = conf.ProgressTimeout
	base := extract.New(s.st.Content(), decode.New(decoding), s.st.Target())
	return applier{base, base, s.tracer, done}
}

// applier extracts layers with a span of their own and counts them.
type applier struct {
	diff.Applier

	base   extract.Applier
	tracer trace.Tracer
	done   func(layer digest.Digest)
}

// hashing returns an applier that hashes archives by the algorithms of their blobs.
func (a applier) hashing(algorithm func(blob digest.Digest) digest.Algorithm) applier {
	a.base = a.base.Hashing(algorithm)
	a.Applier = a.base
	return a
}

// aside returns an applier and a snapshotter, on top of sn, for layers without those below them. They
// are counted when they are committed. The first failure is told to end.
func (a applier) aside(sn snapshots.Snapshotter, lower extract.Lower, end context.CancelCauseFunc) (diff.Applier, snapshots.Snapshotter) {
	aside := extract.NewAside(sn, a.base, lower, a.done)
	a.Applier, a.done = failing{aside, end}, func(digest.Digest) {}
	return a, aside
}

// failing tells of layers that cannot be extracted.
type failing struct {
	diff.Applier

	end context.CancelCauseFunc
}

// Apply implements diff.Applier.
func (f failing) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	got, err := f.Applier.Apply(ctx, desc, mounts, opts...)
	if err != nil {
		err = layerError{fmt.Errorf("layer %s (%s): %w", desc.Digest, desc.MediaType, err)}
		f.end(err)
	}
	return got, err
}

// layerError is why a layer could not be extracted.
type layerError struct{ error }

// Unwrap returns the reason.
func (f layerError) Unwrap() error { return f.error }

// Apply implements diff.Applier.
func (a applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	ctx, span := startLayer(ctx, a.tracer, "sandboxd.image.extract", desc)
	got, err := a.Applier.Apply(ctx, desc, mounts, opts...)
	endLayer(span, err)
	if err == nil {
		a.done(desc.Digest)
	}
	return got, err
}

func startLayer(ctx context.Context, tracer trace.Tracer, name string, desc ocispec.Descriptor) (context.Context, trace.Span) {
	return tracer.Start(ctx, name, trace.WithAttributes( //nolint:spancheck // endLayer ends it
		attribute.String("digest", desc.Digest.String()), attribute.String("media_type", desc.MediaType), attribute.Int64("size", desc.Size)))
}

func endLayer(span trace.Span, err error) {
	failed(span, err)
	span.End()
}

func failed(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
}
