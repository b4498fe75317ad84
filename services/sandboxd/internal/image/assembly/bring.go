// Package assembly puts images together on a node: it has them verified, fetches what is missing,
// unpacks the layers, and mends what is broken.
package assembly

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strconv"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.opentelemetry.io/otel/trace"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/decode"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/keylock"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/verify"
)

// labelRef is the beginning of the labels by which a blob keeps others.
const labelRef = "containerd.io/gc.ref.content."

// Config says how images are assembled.
type Config struct {
	// MaxConcurrentDownloads bounds the layers of one image that are fetched at a time, and
	// MaxConcurrentUnpacks those that are extracted at a time where the snapshotter allows for it.
	MaxConcurrentDownloads, MaxConcurrentUnpacks int
	// KeepLayers wants the blobs of all layers on the node, also of those that are unpacked.
	KeepLayers bool
	// Decode is what layers are decoded with.
	Decode decode.Config
	// Verifiers are asked before anything is fetched but the documents of an image.
	Verifiers verify.Programs
}

// Steps is told how far an image is. Its methods are called concurrently.
type Steps interface {
	// Begin is called once, when the manifest is known.
	Begin(ctx context.Context, manifest *ocispec.Manifest)
	// Arrived says that a blob is on the node, and whether it was brought for this image.
	Arrived(desc ocispec.Descriptor, brought bool)
	// Extracted says that a layer is unpacked, and with it those below.
	Extracted(layer digest.Digest)
}

// Pull is an image that is brought from a registry.
type Pull struct {
	Session     *registry.Session
	Name        string
	Snapshotter string
	Steps       Steps
}

// Assembler puts images together on the storage of a node. Its methods are safe for concurrent
// use: blobs and layers that two images share are fetched and extracted once.
type Assembler struct {
	st     *storage.Storage
	log    *slog.Logger
	tracer trace.Tracer
	shared *keylock.Locks // of blobs and layers
}

// New returns an assembler on an open storage.
func New(st *storage.Storage, log *slog.Logger, tracer trace.Tracer) *Assembler {
	return &Assembler{st: st, log: log, tracer: tracer, shared: keylock.New()}
}

// Bring has the image below root verified, fetches and unpacks it, mends what is broken of it on
// the node, and returns what it is and the descriptor of its root, complete. Everything is held by
// the lease of ctx.
func (a *Assembler) Bring(ctx context.Context, p Pull, root ocispec.Descriptor, cfg Config) (*Contents, ocispec.Descriptor, error) {
	path, err := registry.Tree(ctx, root, platforms.Default(), a.document(p.Session))
	if err != nil {
		return nil, root, err
	}
	root = path[0].Desc
	if err := a.verify(ctx, cfg.Verifiers, p.Name, root); err != nil {
		return nil, root, err
	}
	for i, doc := range path {
		var next *ocispec.Descriptor
		if i+1 < len(path) {
			next = &path[i+1].Desc
		}
		if err := a.keep(ctx, doc, next, cfg.KeepLayers); err != nil {
			return nil, root, err
		}
	}
	manifest := path[len(path)-1]
	p.Steps.Begin(ctx, manifest.Manifest)
	fetch := func(ctx context.Context, desc ocispec.Descriptor) error { return a.fetch(ctx, p, desc) }
	u := unpacking{
		cfg: cfg, name: p.Name, snapshotter: p.Snapshotter, extract: a.extractor(cfg.Decode, p.Steps.Extracted),
		bring: fetch, all: cfg.KeepLayers,
	}
	err = a.unpack(ctx, manifest, u)
	if err != nil && ctx.Err() == nil && a.discardCorrupt(ctx, manifest.Manifest.Layers) {
		err = a.unpack(ctx, manifest, u)
	}
	if err != nil {
		return nil, root, err
	}
	config, err := content.ReadBlob(ctx, a.st.Content(), manifest.Manifest.Config)
	if err != nil {
		return nil, root, fmt.Errorf("image configuration: %w", err)
	}
	c, err := newContents(path, config)
	if err != nil {
		return nil, root, err
	}
	return c, root, a.mend(ctx, c, u)
}

// verify asks the verifiers about what a name stands for.
func (a *Assembler) verify(ctx context.Context, verifiers verify.Programs, name string, desc ocispec.Descriptor) error {
	if verifiers.Dir == "" {
		return nil
	}
	ctx, span := a.tracer.Start(ctx, "sandboxd.image.verify")
	defer span.End()
	err := verifiers.Ask(ctx, name, desc)
	failed(span, err)
	return registry.Failed(ctx, err)
}

// document takes a manifest or index from the node if it is there and whole, else from the
// registry. Either way it is on the node then.
func (a *Assembler) document(session *registry.Session) func(context.Context, ocispec.Descriptor) (registry.Document, error) {
	local := localDocument(a.st.Content())
	return func(ctx context.Context, desc ocispec.Descriptor) (registry.Document, error) {
		unlock, err := a.lockBlob(ctx, desc.Digest)
		if err != nil {
			return registry.Document{}, err
		}
		defer unlock()
		doc, err := local(ctx, desc)
		if err == nil {
			// Writing it once more brings it under the lease.
			return doc, a.store(ctx, doc)
		}
		if errdefs.IsDataLoss(err) || errdefs.IsNotFound(err) {
			if err := a.st.Discard(ctx, desc.Digest); err != nil {
				return registry.Document{}, err
			}
		}
		if doc, err = session.Document(ctx, desc); err != nil {
			return registry.Document{}, err
		}
		return doc, a.store(ctx, doc)
	}
}

func (a *Assembler) store(ctx context.Context, doc registry.Document) error {
	ref := "document-" + doc.Desc.Digest.String()
	if err := content.WriteBlob(ctx, a.st.Content(), ref, bytes.NewReader(doc.Data), doc.Desc); err != nil {
		return fmt.Errorf("manifest %s: %w", doc.Desc.Digest, err)
	}
	return nil
}

// lockBlob keeps other pulls from a blob, with the key that the unpacker uses.
func (a *Assembler) lockBlob(ctx context.Context, dgst digest.Digest) (unlock func(), _ error) {
	key := "blob://" + dgst.String()
	if err := a.shared.Lock(ctx, key); err != nil {
		return nil, err
	}
	return func() { a.shared.Unlock(key) }, nil
}

// keep labels a document so that what it refers to stays as long as it does. Without layers,
// nothing but their snapshots stays of them.
func (a *Assembler) keep(ctx context.Context, doc registry.Document, next *ocispec.Descriptor, layers bool) error {
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
	store := a.st.Content()
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

// fetch brings a blob to the node, unless a whole one is there.
func (a *Assembler) fetch(ctx context.Context, p Pull, desc ocispec.Descriptor) (err error) {
	ctx, span := startLayer(ctx, a.tracer, "sandboxd.image.fetch", desc)
	defer func() { endLayer(span, err) }()
	whole := a.st.BlobPresent
	if images.IsConfigType(desc.MediaType) {
		whole = a.st.BlobIntact
	}
	there := whole(ctx, desc)
	if !there {
		if err := a.st.Discard(ctx, desc.Digest); err != nil {
			return err
		}
	}
	if err := p.Session.Blob(ctx, a.st.Content(), desc); err != nil {
		return err
	}
	p.Steps.Arrived(desc, !there)
	return nil
}
