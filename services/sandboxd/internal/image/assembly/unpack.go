package assembly

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
)

// unpacking is how an image is unpacked.
type unpacking struct {
	cfg         Config
	name        string // of the image
	snapshotter string
	extract     applier
	// bring makes sure that a blob is on the node.
	bring func(context.Context, ocispec.Descriptor) error
	// all brings the blobs of layers that are unpacked already, too. Of a snapshotter in another
	// process, which may read layers from the registry itself, only what it asks for is brought.
	all bool
}

// unpack fetches the configuration and the layers, several at a time, and extracts each as
// soon as it is there; unless the snapshotter can take it alone, as soon as those below are, too.
// The first layer that cannot be extracted ends the work on the others.
func (a *Assembler) unpack(ctx context.Context, manifest registry.Document, how unpacking) error {
	sn, name, err := a.st.Snapshotter(how.snapshotter)
	if err != nil {
		return err
	}
	work, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	proxied := a.st.Proxied(name)
	how.extract = how.extract.hashing(a.algorithms(work, manifest.Manifest))
	platform := unpack.Platform{Platform: platforms.All, Snapshotter: sn, SnapshotterKey: name, Applier: how.extract}
	u, err := unpack.NewUnpacker(work, a.st.Content(), a.unpackOptions(platform, how, cancel)...)
	if err != nil {
		return fmt.Errorf("unpacker: %w", err)
	}
	var fetch images.Handler = images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if desc.Digest == manifest.Desc.Digest {
			return append([]ocispec.Descriptor{manifest.Manifest.Config}, layersFor(manifest.Manifest.Layers, proxied)...), nil
		}
		return nil, how.bring(ctx, desc)
	})
	if proxied {
		fetch = snapshotters.AppendInfoHandlerWrapper(how.name)(fetch)
	}
	err = images.Dispatch(work, u.Unpack(fetch), nil, manifest.Desc)
	if err != nil {
		cancel(nil)
	}
	if _, waitErr := u.Wait(); err == nil {
		err = waitErr
	}
	if cause, ok := errors.AsType[layerError](context.Cause(work)); ok && ctx.Err() == nil {
		err = cause
	}
	return extractionError(registry.Failed(ctx, err))
}

// algorithms are those by which the configuration of an image, which is on the node before the first
// layer is extracted, names the archives of layers.
func (a *Assembler) algorithms(ctx context.Context, m *ocispec.Manifest) func(blob digest.Digest) digest.Algorithm {
	diffs := sync.OnceValue(func() []digest.Digest {
		data, err := content.ReadBlob(ctx, a.st.Content(), m.Config)
		if err != nil {
			return nil // told by whoever needs it
		}
		img, err := registry.ParseConfig(m.Config, data)
		if err != nil {
			return nil
		}
		return img.RootFS.DiffIDs
	})
	return func(blob digest.Digest) digest.Algorithm {
		i := slices.IndexFunc(m.Layers, func(l ocispec.Descriptor) bool { return l.Digest == blob })
		if i < 0 || i >= len(diffs()) {
			return digest.Canonical
		}
		return diffs()[i].Algorithm()
	}
}

// unpackOptions are the limits of an unpacking, and who does what of it. The first layer that cannot
// be extracted is told to end.
func (a *Assembler) unpackOptions(platform unpack.Platform, how unpacking, end context.CancelCauseFunc) []unpack.UnpackerOpt {
	options := []unpack.UnpackerOpt{
		unpack.WithLimiter(semaphore.NewWeighted(int64(how.cfg.MaxConcurrentDownloads))),
		unpack.WithDuplicationSuppressor(a.shared),
	}
	if a.st.Rebases(platform.SnapshotterKey) && how.cfg.MaxConcurrentUnpacks > 1 {
		platform.Applier, platform.Snapshotter = how.extract.aside(platform.Snapshotter, a.st.Lower(platform.SnapshotterKey), end)
		platform.SnapshotterCapabilities = []string{snapshots.RebaseCap}
		options = append(options, unpack.WithUnpackLimiter(semaphore.NewWeighted(int64(how.cfg.MaxConcurrentUnpacks))))
	}
	if how.all && !a.st.Proxied(platform.SnapshotterKey) {
		options = append(options, unpack.WithFetchAllContent())
	}
	return append(options, unpack.WithUnpackPlatform(platform))
}

// layersFor are the layers of an image with the annotations that snapshots are labelled with. The
// snapshotters of this process go by labels of ours alone.
func layersFor(layers []ocispec.Descriptor, proxied bool) []ocispec.Descriptor {
	out := slices.Clone(layers)
	for i := range out {
		out[i].Annotations = maps.Clone(out[i].Annotations)
		if !proxied {
			maps.DeleteFunc(out[i].Annotations, func(name, _ string) bool { return strings.HasPrefix(name, "containerd.io/") })
		}
	}
	return out
}

// UnpackLocal unpacks the image below root from what the node has of it, and mends it there. name is
// one by which the registry knows it. Errors: ErrNotFound if a blob is missing, which a pull mends.
func (a *Assembler) UnpackLocal(ctx context.Context, root ocispec.Descriptor, c *Contents, name, snapshotter string, cfg Config) error {
	path, err := registry.Tree(ctx, root, platforms.Default(), localDocument(a.st.Content()))
	if err != nil {
		return err
	}
	how := unpacking{
		cfg: cfg, name: name, snapshotter: snapshotter, extract: a.extractor(cfg.Decode, func(digest.Digest) {}),
		bring: func(ctx context.Context, desc ocispec.Descriptor) error {
			if !a.st.BlobPresent(ctx, desc) {
				return fmt.Errorf("blob %s is not on the node, pull the image for this runtime handler: %w", desc.Digest, errdefs.ErrNotFound)
			}
			return nil
		},
	}
	if err := a.unpack(ctx, path[len(path)-1], how); err != nil {
		return registry.Classify(err)
	}
	return a.mend(ctx, c, how)
}

// extractionError gives a kind to the errors of the unpacker that have none: a layer whose
// content is not what the configuration says.
func extractionError(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || !errors.Is(errdefs.Resolve(err), errdefs.ErrUnknown) {
		return err
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
}

// discardCorrupt throws away layers whose bytes have changed on the node, and says whether
// there were any.
func (a *Assembler) discardCorrupt(ctx context.Context, layers []ocispec.Descriptor) bool {
	found := false
	for _, l := range layers {
		unlock, err := a.lockBlob(ctx, l.Digest)
		if err != nil {
			return found
		}
		if a.st.BlobPresent(ctx, l) && !a.st.BlobIntact(ctx, l) {
			a.log.WarnContext(ctx, "layer has changed on disk and is fetched again", slog.String("digest", l.Digest.String()))
			if err := a.st.Discard(ctx, l.Digest); err != nil {
				a.log.WarnContext(ctx, "changed layer not discarded", slog.Any("error", err))
			} else {
				found = true
			}
		}
		unlock()
	}
	return found
}

// mend extracts again the layers whose files have gone.
func (a *Assembler) mend(ctx context.Context, c *Contents, how unpacking) error {
	const key = "mend://"
	damaged, err := a.st.Damaged(ctx, how.snapshotter, c.Layers)
	if err != nil || len(damaged) == 0 {
		return err
	}
	if err := a.shared.Lock(ctx, key); err != nil {
		return err
	}
	defer a.shared.Unlock(key)
	if damaged, err = a.st.Damaged(ctx, how.snapshotter, c.Layers); err != nil {
		return err
	}
	for _, i := range damaged {
		a.log.WarnContext(ctx, "files of a layer are gone and are extracted again", slog.String("chain_id", c.Layers[i].ChainID.String()))
		if err := a.mendLayer(ctx, c, i, how); err != nil {
			return registry.Failed(ctx, err)
		}
	}
	return nil
}

// mendLayer extracts a layer again. Its blob may have to be fetched first.
func (a *Assembler) mendLayer(ctx context.Context, c *Contents, i int, how unpacking) error {
	unlock, err := a.lockBlob(ctx, c.Layers[i].Blob.Digest)
	if err != nil {
		return err
	}
	err = how.bring(ctx, c.Layers[i].Blob)
	unlock()
	if err != nil {
		return err
	}
	algorithm := func(digest.Digest) digest.Algorithm { return c.Layers[i].DiffID.Algorithm() }
	return a.st.Restore(ctx, how.extract.hashing(algorithm), how.snapshotter, c.Layers, i)
}
