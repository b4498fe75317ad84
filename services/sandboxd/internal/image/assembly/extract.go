package assembly

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/decode"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/extract"
)

// extractor returns what extracts layers as they are configured to be decoded, and calls done
// after each.
func (a *Assembler) extractor(decoding decode.Config, done func(layer digest.Digest)) applier {
	base := extract.New(a.st.Content(), decode.New(decoding), a.st.Target())
	return applier{base, base, a.tracer, done}
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
