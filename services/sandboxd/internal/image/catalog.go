package image

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
)

// contents is what a root descriptor stands for. It never changes.
type contents struct {
	id     string
	config ocispec.Image
	// blobs are the documents and the configuration; layers are apart.
	blobs  []ocispec.Descriptor
	layers []storage.Layer
	size   uint64
}

func (c *contents) chainID() string {
	if len(c.layers) == 0 {
		return ""
	}
	return c.layers[len(c.layers)-1].ChainID.String()
}

// entry is an image with all its names. It is never changed, only replaced.
type entry struct {
	*contents
	names   []string // all names in the database
	digests []string // of the roots, in the form of bare digests
	shown   *criv1.Image
}

// catalog is a consistent view of all images.
type catalog struct {
	entries []*entry // by id, ascending
	byID    map[string]*entry
	byName  map[string]*entry
}

// find looks an image up.
func (c *catalog) find(q query) *entry {
	if q.digest != "" {
		if e := c.byID[q.digest]; e != nil {
			return e
		}
		for _, e := range c.entries {
			if slices.Contains(e.digests, q.digest) {
				return e
			}
		}
		return nil
	}
	if e := c.byName[q.name]; e != nil || q.prefix == "" {
		return e
	}
	var found *entry
	for _, e := range c.entries {
		if strings.HasPrefix(e.id, q.prefix) {
			if found != nil {
				return nil // ambiguous
			}
			found = e
		}
	}
	return found
}

// reload builds the catalog anew from the database. Images that cannot be read are left out:
// a pull repairs them.
func (s *Service) reload(ctx context.Context) error {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	records, err := s.st.Images().List(ctx)
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	next := &catalog{byID: make(map[string]*entry), byName: make(map[string]*entry)}
	known := make(map[digest.Digest]*contents)
	for _, r := range records {
		c := s.known[r.Target.Digest]
		if c == nil {
			if c, err = readContents(ctx, s.st.Content(), r.Target); err != nil {
				s.log.WarnContext(ctx, "image not readable", slog.String("image", r.Name), slog.Any("error", err))
				continue
			}
		}
		known[r.Target.Digest] = c
		e := next.byID[c.id]
		if e == nil {
			e = &entry{contents: c}
			next.byID[c.id] = e
			next.entries = append(next.entries, e)
		}
		e.names = append(e.names, r.Name)
		if d := r.Target.Digest.String(); !slices.Contains(e.digests, d) {
			e.digests = append(e.digests, d)
		}
		next.byName[r.Name] = e
	}
	slices.SortFunc(next.entries, func(a, b *entry) int { return strings.Compare(a.id, b.id) })
	for _, e := range next.entries {
		e.shown = s.show(e)
	}
	s.known = known
	s.catalog.Store(next)
	return nil
}

// show makes the form of an image that callers see.
func (s *Service) show(e *entry) *criv1.Image {
	img := &criv1.Image{Id: e.id, Size: e.size, Spec: &criv1.ImageSpec{Image: e.id}}
	slices.Sort(e.names)
	for _, n := range e.names {
		named, err := reference.ParseNormalizedNamed(n)
		if err != nil || n == e.id {
			continue
		}
		if _, ok := named.(reference.Digested); ok {
			img.RepoDigests = append(img.RepoDigests, n)
		} else {
			img.RepoTags = append(img.RepoTags, n)
		}
	}
	img.Uid, img.Username = userOf(e.config.Config.User)
	img.Pinned = s.conf.Load().pinned.match(e.names...)
	return img
}

// userOf splits the user of an image configuration ("user[:group]") into what callers want.
func userOf(user string) (*criv1.Int64Value, string) {
	user, _, _ = strings.Cut(user, ":")
	if uid, err := strconv.ParseInt(user, 10, 64); err == nil {
		return &criv1.Int64Value{Value: uid}, ""
	}
	return nil, user
}

// readContents reads what a root stands for from the blobs of the node.
func readContents(ctx context.Context, store content.Store, root ocispec.Descriptor) (*contents, error) {
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
func newContents(path []registry.Document, config []byte) (*contents, error) {
	manifest := path[len(path)-1].Manifest
	img, err := registry.ParseConfig(manifest.Config, config)
	if err != nil {
		return nil, err
	}
	c := &contents{id: manifest.Config.Digest.String(), config: img}
	for _, doc := range path {
		c.blobs = append(c.blobs, doc.Desc)
	}
	c.blobs = append(c.blobs, manifest.Config)
	for _, b := range c.blobs {
		c.size += uint64(max(b.Size, 0))
	}
	diffs := img.RootFS.DiffIDs
	if len(diffs) != len(manifest.Layers) {
		return nil, fmt.Errorf("image configuration %s names %d layers, the manifest %d: %w",
			c.id, len(diffs), len(manifest.Layers), errdefs.ErrInvalidArgument)
	}
	chain := identity.ChainIDs(slices.Clone(diffs))
	for i, l := range manifest.Layers {
		c.layers = append(c.layers, storage.Layer{ChainID: chain[i], DiffID: diffs[i], Blob: l})
		c.size += uint64(max(l.Size, 0))
	}
	return c, nil
}

// verbose returns what only a curious caller wants to know.
func (e *entry) verbose() (map[string]string, error) {
	info, err := json.Marshal(struct {
		ChainID string        `json:"chainID"`
		Spec    ocispec.Image `json:"imageSpec"`
	}{e.chainID(), e.config})
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", e.id, err)
	}
	return map[string]string{"info": string(info)}, nil
}
