package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// maxDocument bounds manifests and indexes.
	maxDocument = 4 << 20
	// maxConfig bounds image configurations, which are kept in memory, and shown in answers that
	// kubelet reads up to 16 MiB of.
	maxConfig = 8 << 20
	// maxUser bounds the user that an image names, which is shown in each list of images.
	maxUser = 4 << 10
	// MaxDepth bounds indexes within indexes.
	MaxDepth = 4
	// nodeLabels begins the names of the labels by which the node's storage goes; those with
	// snapshotLabels are for snapshotters, of which overlayLabels are for that of the node.
	nodeLabels     = "containerd.io/"
	snapshotLabels = nodeLabels + "snapshot/"
	overlayLabels  = snapshotLabels + "overlay."
)

// Document is a manifest or an index, as the registry gave it and as it says of itself.
type Document struct {
	// Desc has the media type found in the content, not the one that was claimed.
	Desc ocispec.Descriptor
	// Data is the content; it has the descriptor's digest and size.
	Data []byte
	// Index or Manifest is set.
	Index    *ocispec.Index
	Manifest *ocispec.Manifest
}

// Document fetches a manifest or index by its digest. A size of 0 means that it is not known.
// Content that does not fit the digest is asked for once more, where a mirror gave it from the
// next host.
func (s *Session) Document(ctx context.Context, desc ocispec.Descriptor) (Document, error) {
	for wrong := 0; ; {
		doc, err := s.document(ctx, desc)
		if !errdefs.IsDataLoss(err) || ctx.Err() != nil {
			return doc, err
		}
		if s.blame(desc.Digest) {
			continue
		}
		if wrong++; wrong >= maxWrongBytes {
			return doc, err
		}
	}
}

func (s *Session) document(ctx context.Context, desc ocispec.Descriptor) (Document, error) {
	limit := desc.Size
	if limit == 0 {
		limit = maxDocument
	}
	if limit > maxDocument {
		return Document{}, tooLarge(desc.Digest.String(), limit)
	}
	if limit < 0 {
		return Document{}, fmt.Errorf("manifest %s has size %d: %w", desc.Digest, desc.Size, errdefs.ErrInvalidArgument)
	}
	// The media type selects the manifests endpoint; a blob of the same digest is not asked for.
	ask := ocispec.Descriptor{MediaType: desc.MediaType, Digest: desc.Digest, Size: limit}
	if !isDocument(ask.MediaType) {
		ask.MediaType = ocispec.MediaTypeImageManifest
	}
	r, err := s.fetcher.Fetch(ctx, ask)
	if err != nil {
		return Document{}, Failed(ctx, err)
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return Document{}, Failed(ctx, fmt.Errorf("manifest %s: %w", desc.Digest, err))
	}
	return ParseDocument(desc, data)
}

// tooLarge is the error of a manifest or index that has more bytes than are read.
func tooLarge(name string, size int64) error {
	return fmt.Errorf("manifest of %s has %d bytes, at most %d are accepted: %w", name, size, maxDocument, errdefs.ErrInvalidArgument)
}

// ParseDocument checks content against its descriptor and finds out what it is. A size of 0
// stands for any.
// Errors: ErrDataLoss for a wrong digest or size, ErrInvalidArgument for something else than
// a manifest or index, or for a document that contradicts its descriptor.
func ParseDocument(desc ocispec.Descriptor, data []byte) (Document, error) {
	if desc.Size == 0 {
		desc.Size = int64(len(data))
	}
	if int64(len(data)) != desc.Size {
		return Document{}, fmt.Errorf("manifest %s has %d bytes instead of %d: %w", desc.Digest, len(data), desc.Size, errdefs.ErrDataLoss)
	}
	if err := desc.Digest.Validate(); err != nil {
		return Document{}, fmt.Errorf("digest %q: %w: %w", desc.Digest, err, errdefs.ErrInvalidArgument)
	}
	if got := desc.Digest.Algorithm().FromBytes(data); got != desc.Digest {
		return Document{}, fmt.Errorf("manifest %s has digest %s: %w", desc.Digest, got, errdefs.ErrDataLoss)
	}
	mediaType, err := detect(data)
	if err != nil {
		return Document{}, fmt.Errorf("manifest %s: %w", desc.Digest, err)
	}
	if isDocument(desc.MediaType) && images.IsIndexType(desc.MediaType) != images.IsIndexType(mediaType) {
		return Document{}, fmt.Errorf("manifest %s is announced as %q and is %q: %w", desc.Digest, desc.MediaType, mediaType, errdefs.ErrInvalidArgument)
	}
	doc := Document{Data: data, Desc: ocispec.Descriptor{MediaType: mediaType, Digest: desc.Digest, Size: desc.Size, Platform: desc.Platform}}
	var into any
	if images.IsIndexType(mediaType) {
		doc.Index = new(ocispec.Index)
		into = doc.Index
	} else {
		doc.Manifest = new(ocispec.Manifest)
		into = doc.Manifest
	}
	if err := json.Unmarshal(data, into); err != nil {
		return Document{}, fmt.Errorf("manifest %s: %w: %w", desc.Digest, err, errdefs.ErrInvalidArgument)
	}
	if doc.Manifest != nil {
		err = checkManifest(doc.Manifest)
	}
	if err != nil {
		return Document{}, fmt.Errorf("manifest %s: %w", desc.Digest, err)
	}
	return doc, nil
}

func isDocument(mediaType string) bool {
	return images.IsManifestType(mediaType) || images.IsIndexType(mediaType)
}

// detect finds the media type of a document from what is in it.
func detect(data []byte) (string, error) {
	var doc struct {
		MediaType string          `json:"mediaType"`
		Manifests json.RawMessage `json:"manifests"`
		Config    json.RawMessage `json:"config"`
		Layers    json.RawMessage `json:"layers"`
		FSLayers  json.RawMessage `json:"fsLayers"`
	}
	if err := json.Unmarshal(bytes.TrimSpace(data), &doc); err != nil {
		return "", fmt.Errorf("neither manifest nor index: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	index := len(doc.Manifests) > 0
	manifest := len(doc.Config) > 0 || len(doc.Layers) > 0
	switch {
	case len(doc.FSLayers) > 0:
		return "", fmt.Errorf("schema 1 manifests are not supported: %w", errdefs.ErrNotImplemented)
	case index == manifest:
		return "", fmt.Errorf("neither manifest nor index: %w", errdefs.ErrInvalidArgument)
	case doc.MediaType == "" && index:
		return ocispec.MediaTypeImageIndex, nil
	case doc.MediaType == "":
		return ocispec.MediaTypeImageManifest, nil
	case !isDocument(doc.MediaType) || images.IsIndexType(doc.MediaType) != index:
		return "", fmt.Errorf("media type %q does not fit the content: %w", doc.MediaType, errdefs.ErrInvalidArgument)
	}
	return doc.MediaType, nil
}

// checkManifest refuses what is not a container image, and takes out of the descriptors what
// an image must not decide: other servers to ask, and labels of the node's storage.
func checkManifest(m *ocispec.Manifest) error {
	if !images.IsConfigType(m.Config.MediaType) {
		return fmt.Errorf("not a container image: configuration of type %q: %w", m.Config.MediaType, errdefs.ErrInvalidArgument)
	}
	clean := func(d *ocispec.Descriptor) error {
		d.URLs, d.Data = nil, nil
		maps.DeleteFunc(d.Annotations, func(name, _ string) bool {
			// By the reference a partial blob would be found.
			return nodes(name) || name == ocispec.AnnotationRefName
		})
		if err := d.Digest.Validate(); err != nil {
			return fmt.Errorf("digest %q: %w: %w", d.Digest, err, errdefs.ErrInvalidArgument)
		}
		if d.Size < 0 || (d.Size == 0 && d.Digest != d.Digest.Algorithm().FromBytes(nil)) {
			return fmt.Errorf("blob %s has size %d: %w", d.Digest, d.Size, errdefs.ErrInvalidArgument)
		}
		return nil
	}
	if err := clean(&m.Config); err != nil {
		return err
	}
	if m.Config.Size > maxConfig {
		return fmt.Errorf("image configuration has %d bytes, more than %d: %w", m.Config.Size, maxConfig, errdefs.ErrInvalidArgument)
	}
	sizes := map[digest.Digest]int64{m.Config.Digest: m.Config.Size}
	for i := range m.Layers {
		if !images.IsLayerType(m.Layers[i].MediaType) {
			return fmt.Errorf("layer of unknown type %q: %w", m.Layers[i].MediaType, errdefs.ErrInvalidArgument)
		}
		if err := clean(&m.Layers[i]); err != nil {
			return err
		}
		l := m.Layers[i]
		if size, known := sizes[l.Digest]; known && size != l.Size {
			return fmt.Errorf("blob %s has size %d and %d: %w", l.Digest, size, l.Size, errdefs.ErrInvalidArgument)
		}
		sizes[l.Digest] = l.Size
	}
	return nil
}

// nodes says that an annotation would decide how the node's storage works.
func nodes(name string) bool {
	return strings.HasPrefix(name, nodeLabels) && !strings.HasPrefix(name, snapshotLabels) || strings.HasPrefix(name, overlayLabels)
}

// Candidates returns the manifests of an index that run on the platform, the best first.
// Attestations and other companions are left out.
func Candidates(index *ocispec.Index, platform platforms.MatchComparer) []ocispec.Descriptor {
	var out []ocispec.Descriptor
	for _, d := range index.Manifests {
		if !isDocument(d.MediaType) || d.Annotations["vnd.docker.reference.type"] != "" {
			continue
		}
		if d.Platform == nil || platform.Match(*d.Platform) {
			out = append(out, ocispec.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size, Platform: d.Platform})
		}
	}
	slices.SortStableFunc(out, func(a, b ocispec.Descriptor) int {
		switch {
		case a.Platform == nil && b.Platform == nil:
			return 0
		case a.Platform == nil:
			return 1
		case b.Platform == nil:
			return -1
		case platform.Less(*a.Platform, *b.Platform):
			return -1
		case platform.Less(*b.Platform, *a.Platform):
			return 1
		}
		return 0
	})
	return out
}

// Tree finds the image for a platform below a root, which may be a manifest or an index. The
// documents are returned from the root down; the last is the image's manifest. An index within
// another that says no platform of its own may turn out to have none that fits: the next one is
// looked into then. get delivers a document, from the node or from the registry. Errors: those of
// get, ErrNotFound if there is no image for the platform.
func Tree(ctx context.Context, root ocispec.Descriptor, platform platforms.MatchComparer, get func(context.Context, ocispec.Descriptor) (Document, error)) ([]Document, error) {
	return tree(ctx, root, platform, get, 0)
}

func tree(ctx context.Context, root ocispec.Descriptor, platform platforms.MatchComparer, get func(context.Context, ocispec.Descriptor) (Document, error), depth int) ([]Document, error) {
	doc, err := get(ctx, root)
	if err != nil {
		return nil, err
	}
	if doc.Index == nil {
		return []Document{doc}, nil
	}
	if depth >= MaxDepth {
		return nil, fmt.Errorf("index %s is nested too deeply: %w", root.Digest, errdefs.ErrInvalidArgument)
	}
	none := ForeignError{fmt.Errorf("index %s has no image for %s: %w", doc.Desc.Digest, platforms.DefaultString(), errdefs.ErrNotFound)}
	for _, fit := range Candidates(doc.Index, platform) {
		if fit.Size <= 0 {
			return nil, fmt.Errorf("index %s: manifest %s has size %d: %w", doc.Desc.Digest, fit.Digest, fit.Size, errdefs.ErrInvalidArgument)
		}
		path, err := tree(ctx, fit, platform, get, depth+1)
		if _, ok := errors.AsType[ForeignError](err); ok {
			continue
		}
		return append([]Document{doc}, path...), err
	}
	return nil, none
}

// ForeignError is an error of [Tree], and of its get, that says that there is no image for the platform
// below an index.
type ForeignError struct{ error }

// NewForeignError returns the error with its reason.
func NewForeignError(reason error) error { return ForeignError{reason} }

// Unwrap returns the reason.
func (f ForeignError) Unwrap() error { return f.error }

// ParseConfig checks an image configuration against its descriptor and parses it.
// Errors: ErrDataLoss, ErrInvalidArgument.
func ParseConfig(desc ocispec.Descriptor, data []byte) (ocispec.Image, error) {
	var img ocispec.Image
	if got := desc.Digest.Algorithm().FromBytes(data); got != desc.Digest || int64(len(data)) != desc.Size {
		return img, fmt.Errorf("image configuration %s has digest %s and %d bytes: %w", desc.Digest, got, len(data), errdefs.ErrDataLoss)
	}
	if err := json.Unmarshal(data, &img); err != nil {
		return img, fmt.Errorf("image configuration %s: %w: %w", desc.Digest, err, errdefs.ErrInvalidArgument)
	}
	if t := img.RootFS.Type; t != "" && t != "layers" {
		return img, fmt.Errorf("image configuration %s: root file system of type %q: %w", desc.Digest, t, errdefs.ErrInvalidArgument)
	}
	if n := len(img.Config.User); n > maxUser {
		return img, fmt.Errorf("image configuration %s: user of %d bytes, at most %d are accepted: %w", desc.Digest, n, maxUser, errdefs.ErrInvalidArgument)
	}
	for _, d := range img.RootFS.DiffIDs {
		if err := d.Validate(); err != nil {
			return img, fmt.Errorf("image configuration %s: layer %q: %w: %w", desc.Digest, d, err, errdefs.ErrInvalidArgument)
		}
	}
	return img, nil
}
