package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
)

// labelRef is the beginning of the labels by which a blob keeps others.
const labelRef = "containerd.io/gc.ref.content."

// bringing is what one pull works with.
type bringing struct {
	session     *registry.Session
	name        reference.Named
	snapshotter string
	// keepLayers wants the blobs of all layers on the node, also of those that are unpacked.
	keepLayers bool
	steps      *progress
}

// bring has the image below root verified, fetches and unpacks the image below root, mends what is broken of it on the node,
// and returns what it is. Everything is held by the lease of ctx.
func (s *Service) bring(ctx context.Context, b bringing, root ocispec.Descriptor) (*contents, ocispec.Descriptor, error) {
	path, err := registry.Tree(ctx, root, platforms.Default(), s.document(b.session))
	if err != nil {
		return nil, root, err
	}
	root = path[0].Desc
	if err := s.verify(ctx, b.name, root); err != nil {
		return nil, root, err
	}
	for i, doc := range path {
		var next *ocispec.Descriptor
		if i+1 < len(path) {
			next = &path[i+1].Desc
		}
		if err := s.keep(ctx, doc, next, b.keepLayers); err != nil {
			return nil, root, err
		}
	}
	manifest := path[len(path)-1]
	b.steps.begin(ctx, manifest.Manifest)
	fetch := func(ctx context.Context, desc ocispec.Descriptor) error { return s.fetch(ctx, b, desc) }
	u := unpacking{name: b.name.String(), snapshotter: b.snapshotter, extract: s.extractor(b.steps.extracted), bring: fetch, all: b.keepLayers}
	err = s.unpack(ctx, manifest, u)
	if err != nil && ctx.Err() == nil && s.discardCorrupt(ctx, manifest.Manifest.Layers) {
		err = s.unpack(ctx, manifest, u)
	}
	if err != nil {
		return nil, root, err
	}
	config, err := content.ReadBlob(ctx, s.st.Content(), manifest.Manifest.Config)
	if err != nil {
		return nil, root, fmt.Errorf("image configuration: %w", err)
	}
	c, err := newContents(path, config)
	if err != nil {
		return nil, root, err
	}
	return c, root, s.mend(ctx, c, u)
}

// document takes a manifest or index from the node if it is there and whole, else from the
// registry. Either way it is on the node then.
func (s *Service) document(session *registry.Session) func(context.Context, ocispec.Descriptor) (registry.Document, error) {
	local := localDocument(s.st.Content())
	return func(ctx context.Context, desc ocispec.Descriptor) (registry.Document, error) {
		unlock, err := s.lockBlob(ctx, desc.Digest)
		if err != nil {
			return registry.Document{}, err
		}
		defer unlock()
		doc, err := local(ctx, desc)
		if err == nil {
			// Writing it once more brings it under the lease.
			return doc, s.store(ctx, doc)
		}
		if errdefs.IsDataLoss(err) || errdefs.IsNotFound(err) {
			if err := s.st.Discard(ctx, desc.Digest); err != nil {
				return registry.Document{}, err
			}
		}
		if doc, err = session.Document(ctx, desc); err != nil {
			return registry.Document{}, err
		}
		return doc, s.store(ctx, doc)
	}
}

func (s *Service) store(ctx context.Context, doc registry.Document) error {
	ref := "document-" + doc.Desc.Digest.String()
	if err := content.WriteBlob(ctx, s.st.Content(), ref, bytes.NewReader(doc.Data), doc.Desc); err != nil {
		return fmt.Errorf("manifest %s: %w", doc.Desc.Digest, err)
	}
	return nil
}

// lockBlob keeps other pulls from a blob, with the key that the unpacker uses.
func (s *Service) lockBlob(ctx context.Context, dgst digest.Digest) (unlock func(), _ error) {
	key := "blob://" + dgst.String()
	if err := s.shared.Lock(ctx, key); err != nil {
		return nil, err
	}
	return func() { s.shared.Unlock(key) }, nil
}

// keep labels a document so that what it refers to stays as long as it does. Without layers,
// nothing but their snapshots stays of them.
func (s *Service) keep(ctx context.Context, doc registry.Document, next *ocispec.Descriptor, layers bool) error {
	refs := make(map[string]string)
	if next != nil {
		refs[labelRef+"m.0"] = next.Digest.String()
	}
	if doc.Manifest != nil {
		refs[labelRef+"config"] = doc.Manifest.Config.Digest.String()
		for i, l := range doc.Manifest.Layers {
			refs[labelRef+"l."+strconv.Itoa(i)] = ""
			if layers {
				refs[labelRef+"l."+strconv.Itoa(i)] = l.Digest.String()
			}
		}
	}
	store := s.st.Content()
	info, err := store.Info(ctx, doc.Desc.Digest)
	if err != nil {
		return fmt.Errorf("manifest %s: %w", doc.Desc.Digest, err)
	}
	var missing []string
	for k, v := range refs {
		if info.Labels[k] != v {
			missing = append(missing, "labels."+k)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if _, err := store.Update(ctx, content.Info{Digest: doc.Desc.Digest, Labels: refs}, missing...); err != nil {
		return fmt.Errorf("manifest %s: %w", doc.Desc.Digest, err)
	}
	return nil
}

// unpacking is how an image is unpacked.
type unpacking struct {
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
func (s *Service) unpack(ctx context.Context, manifest registry.Document, how unpacking) error {
	sn, name, err := s.st.Snapshotter(how.snapshotter)
	if err != nil {
		return err
	}
	work, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	proxied := s.st.Proxied(name)
	how.extract = how.extract.hashing(s.algorithms(work, manifest.Manifest))
	platform := unpack.Platform{Platform: platforms.All, Snapshotter: sn, SnapshotterKey: name, Applier: how.extract}
	u, err := unpack.NewUnpacker(work, s.st.Content(), s.unpackOptions(platform, how, cancel)...)
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
func (s *Service) algorithms(ctx context.Context, m *ocispec.Manifest) func(blob digest.Digest) digest.Algorithm {
	diffs := sync.OnceValue(func() []digest.Digest {
		data, err := content.ReadBlob(ctx, s.st.Content(), m.Config)
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
func (s *Service) unpackOptions(platform unpack.Platform, how unpacking, end context.CancelCauseFunc) []unpack.UnpackerOpt {
	conf := s.conf.Load()
	options := []unpack.UnpackerOpt{
		unpack.WithLimiter(semaphore.NewWeighted(int64(conf.MaxConcurrentDownloads))),
		unpack.WithDuplicationSuppressor(s.shared),
	}
	if s.st.Rebases(platform.SnapshotterKey) && conf.MaxConcurrentUnpacks > 1 {
		platform.Applier, platform.Snapshotter = how.extract.aside(platform.Snapshotter, s.st.Lower(platform.SnapshotterKey), end)
		platform.SnapshotterCapabilities = []string{snapshots.RebaseCap}
		options = append(options, unpack.WithUnpackLimiter(semaphore.NewWeighted(int64(conf.MaxConcurrentUnpacks))))
	}
	if how.all && !s.st.Proxied(platform.SnapshotterKey) {
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

// fetch brings a blob to the node, unless a whole one is there.
func (s *Service) fetch(ctx context.Context, b bringing, desc ocispec.Descriptor) (err error) {
	ctx, span := startLayer(ctx, s.tracer, "sandboxd.image.fetch", desc)
	defer func() { endLayer(span, err) }()
	whole := s.st.BlobPresent
	if images.IsConfigType(desc.MediaType) {
		whole = s.st.BlobIntact
	}
	there := whole(ctx, desc)
	if !there {
		if err := s.st.Discard(ctx, desc.Digest); err != nil {
			return err
		}
	}
	if err := b.session.Blob(ctx, s.st.Content(), desc); err != nil {
		return err
	}
	b.steps.arrived(desc, !there)
	return nil
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
func (s *Service) discardCorrupt(ctx context.Context, layers []ocispec.Descriptor) bool {
	found := false
	for _, l := range layers {
		unlock, err := s.lockBlob(ctx, l.Digest)
		if err != nil {
			return found
		}
		if s.st.BlobPresent(ctx, l) && !s.st.BlobIntact(ctx, l) {
			s.log.WarnContext(ctx, "layer has changed on disk and is fetched again", slog.String("digest", l.Digest.String()))
			if err := s.st.Discard(ctx, l.Digest); err != nil {
				s.log.WarnContext(ctx, "changed layer not discarded", slog.Any("error", err))
			} else {
				found = true
			}
		}
		unlock()
	}
	return found
}

// mend extracts again the layers whose files have gone.
func (s *Service) mend(ctx context.Context, c *contents, how unpacking) error {
	const key = "mend://"
	damaged, err := s.st.Damaged(ctx, how.snapshotter, c.layers)
	if err != nil || len(damaged) == 0 {
		return err
	}
	if err := s.shared.Lock(ctx, key); err != nil {
		return err
	}
	defer s.shared.Unlock(key)
	if damaged, err = s.st.Damaged(ctx, how.snapshotter, c.layers); err != nil {
		return err
	}
	for _, i := range damaged {
		s.log.WarnContext(ctx, "files of a layer are gone and are extracted again", slog.String("chain_id", c.layers[i].ChainID.String()))
		if err := s.mendLayer(ctx, c, i, how); err != nil {
			return registry.Failed(ctx, err)
		}
	}
	return nil
}

// mendLayer extracts a layer again. Its blob may have to be fetched first.
func (s *Service) mendLayer(ctx context.Context, c *contents, i int, how unpacking) error {
	unlock, err := s.lockBlob(ctx, c.layers[i].Blob.Digest)
	if err != nil {
		return err
	}
	err = how.bring(ctx, c.layers[i].Blob)
	unlock()
	if err != nil {
		return err
	}
	algorithm := func(digest.Digest) digest.Algorithm { return c.layers[i].DiffID.Algorithm() }
	return s.st.Restore(ctx, how.extract.hashing(algorithm), how.snapshotter, c.layers, i)
}
