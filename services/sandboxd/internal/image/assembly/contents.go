package assembly

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
)

// Contents is what a root descriptor stands for. It never changes.
type Contents struct {
	ID     string
	Config ocispec.Image
	// Blobs are the documents and the configuration; Layers are apart.
	Blobs  []ocispec.Descriptor
	Layers []storage.Layer
	Size   uint64
}

// ChainID names all layers of an image together; empty without any.
func (c *Contents) ChainID() string {
	if len(c.Layers) == 0 {
		return ""
	}
	return c.Layers[len(c.Layers)-1].ChainID.String()
}

// Read reads what a root stands for from the blobs of the node.
func Read(ctx context.Context, store content.Store, root ocispec.Descriptor) (*Contents, error) {
	path, err := registry.Tree(ctx, root, platforms.Default(), localDocument(store))
	if err != nil {
		return nil, err
	}
	manifest := path[len(path)-1].Manifest
	data, err := content.ReadBlob(ctx, store, manifest.Config)
	if err != nil {
		return nil, fmt.Errorf("image configuration: %w", err)
	}
	return newContents(path, data)
}

// localDocument reads documents on the node. Of indexes within others only that is kept on which the
// image was found.
func localDocument(store content.Store) func(context.Context, ocispec.Descriptor) (registry.Document, error) {
	return func(ctx context.Context, desc ocispec.Descriptor) (registry.Document, error) {
		data, err := content.ReadBlob(ctx, store, ocispec.Descriptor{Digest: desc.Digest, Size: desc.Size})
		if errdefs.IsNotFound(err) && images.IsIndexType(desc.MediaType) {
			return registry.Document{}, registry.NewForeignError(err)
		}
		if err != nil {
			return registry.Document{}, fmt.Errorf("manifest: %w", err)
		}
		return registry.ParseDocument(desc, data)
	}
}

// newContents puts together what is known of an image: its documents from the root down and
// its configuration. Errors: ErrInvalidArgument, ErrDataLoss.
func newContents(path []registry.Document, config []byte) (*Contents, error) {
	manifest := path[len(path)-1].Manifest
	img, err := registry.ParseConfig(manifest.Config, config)
	if err != nil {
		return nil, err
	}
	c := &Contents{ID: manifest.Config.Digest.String(), Config: img}
	for _, doc := range path {
		c.Blobs = append(c.Blobs, doc.Desc)
	}
	c.Blobs = append(c.Blobs, manifest.Config)
	for _, b := range c.Blobs {
		c.Size += uint64(max(b.Size, 0))
	}
	diffs := img.RootFS.DiffIDs
	if len(diffs) != len(manifest.Layers) {
		return nil, fmt.Errorf("image configuration %s names %d layers, the manifest %d: %w",
			c.ID, len(diffs), len(manifest.Layers), errdefs.ErrInvalidArgument)
	}
	chain := identity.ChainIDs(slices.Clone(diffs))
	for i, l := range manifest.Layers {
		c.Layers = append(c.Layers, storage.Layer{ChainID: chain[i], DiffID: diffs[i], Blob: l})
		c.Size += uint64(max(l.Size, 0))
	}
	return c, nil
}
