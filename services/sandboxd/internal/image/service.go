// Package image pulls, lists and removes the images of a node.
//
// An image is reported only when its layers are unpacked; a broken one is reported as absent
// and mended by the next pull. Identical pulls are joined, and a pull that nobody waits for is
// cancelled and leaves nothing behind. A pull that failed is gone on with by the next attempt,
// also after a restart; what it has brought is given up after an hour, and at once when space
// is wanted. Reads are answered from memory, after a
// look at the files of the one image that is asked for. The package does not make the root
// file systems of containers, and it does not decide which images to remove.
package image

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"go.opentelemetry.io/otel/trace"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/assembly"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/progress"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// defaultLayers is how many layers of a pull are fetched, and extracted, at a time unless configured.
const defaultLayers = 3

// Service is the image service of a node. Its methods are safe for concurrent use. Before
// Load has returned they fail with ErrUnavailable.
type Service struct {
	conf   atomic.Pointer[settings]
	st     *storage.Storage
	log    *slog.Logger
	tracer trace.Tracer
	inUse  func(ctx context.Context, imageID string) []string

	assembler *assembly.Assembler
	pulls     flights
	catalog   atomic.Pointer[catalog]

	reloading sync.Mutex
	known     map[digest.Digest]*assembly.Contents // reloading guards known, by root
}

// New returns a service on an open storage. inUse returns the ids of the containers that
// need an image.
func New(cfg Config, st *storage.Storage, log *slog.Logger, tracer trace.Tracer, inUse func(ctx context.Context, imageID string) []string) *Service {
	if cfg.Metrics == nil {
		cfg.Metrics = progress.NewMetrics(nil)
	}
	s := &Service{st: st, log: log, tracer: tracer, inUse: inUse, assembler: assembly.New(st, log, tracer)}
	s.conf.Store(newSettings(cfg))
	return s
}

// settings are what Configure changes.
type settings struct {
	Config

	pinned patterns
}

func newSettings(cfg Config) *settings {
	for _, n := range []*int{&cfg.MaxConcurrentDownloads, &cfg.MaxConcurrentUnpacks} {
		if *n <= 0 {
			*n = defaultLayers
		}
	}
	return &settings{Config: cfg, pinned: newPatterns(cfg.PinnedImages)}
}

// assembly is how images are put together.
func (s *settings) assembly() assembly.Config {
	decoding := s.Decode
	decoding.Patience = s.ProgressTimeout
	return assembly.Config{
		MaxConcurrentDownloads: s.MaxConcurrentDownloads, MaxConcurrentUnpacks: s.MaxConcurrentUnpacks,
		KeepLayers: !s.DiscardLayers, Decode: decoding, Verifiers: s.Verifiers,
	}
}

// Configure changes the configuration, but for OnChange, UserAgent and Metrics. Pulls that are under way
// keep what they began with.
func (s *Service) Configure(ctx context.Context, cfg Config) error {
	now := s.conf.Load()
	cfg.OnChange, cfg.UserAgent, cfg.Metrics = now.OnChange, now.UserAgent, now.Metrics
	s.conf.Store(newSettings(cfg))
	if s.catalog.Load() == nil {
		return nil // Load will show the images with it
	}
	return s.reload(s.st.Context(ctx))
}

// Load reads the images of the node.
func (s *Service) Load(ctx context.Context) error { return s.reload(s.st.Context(ctx)) }

// Close cancels the pulls and returns when they have cleaned up. It must come before the
// storage is closed.
func (s *Service) Close() { s.pulls.close() }

func (s *Service) current() (*catalog, error) {
	c := s.catalog.Load()
	if c == nil {
		return nil, fmt.Errorf("images are not loaded yet: %w", errdefs.ErrUnavailable)
	}
	return c, nil
}

// List returns the images that the filter selects, by ascending id. The images are shared
// and must not be changed. Errors: ErrInvalidArgument.
func (s *Service) List(_ context.Context, filter *criv1.ImageFilter) ([]*criv1.Image, error) {
	c, err := s.current()
	if err != nil {
		return nil, err
	}
	if ref := filter.GetImage().GetImage(); ref != "" {
		q, err := parseQuery(ref)
		if err != nil {
			return nil, err
		}
		if e := c.find(q); e != nil {
			return []*criv1.Image{e.shown}, nil
		}
		return nil, nil
	}
	out := make([]*criv1.Image, 0, len(c.entries))
	for _, e := range c.entries {
		out = append(out, e.shown)
	}
	return out, nil
}

// Status returns an image by id, digest or name, and with verbose some more about it. The
// image is nil if the node does not have it whole. It must not be changed.
// Errors: ErrInvalidArgument, ErrUnavailable if its snapshotter is away.
func (s *Service) Status(ctx context.Context, spec *criv1.ImageSpec, verbose bool) (*criv1.Image, map[string]string, error) {
	snapshotter, err := s.snapshotter(spec)
	if err != nil {
		return nil, nil, err
	}
	e, err := s.lookup(spec.GetImage())
	if err != nil || e == nil {
		return nil, nil, err
	}
	err = s.check(ctx, e, snapshotter)
	switch {
	case errdefs.IsUnavailable(err):
		return nil, nil, fmt.Errorf("image %q: %w", spec.GetImage(), err)
	case err != nil:
		s.log.WarnContext(ctx, "image is broken and shown as absent", slog.String("image_id", e.ID), slog.Any("error", err))
		return nil, nil, nil
	}
	if !verbose {
		return e.shown, nil, nil
	}
	info, err := e.verbose()
	return e.shown, info, err
}

// Resolve finds an image by id, the beginning of one (12 characters or more), digest or
// name, and checks that its layers are there. Errors: ErrNotFound, ErrInvalidArgument,
// ErrUnavailable if a snapshotter is away that may have them.
func (s *Service) Resolve(ctx context.Context, ref string) (pod.Image, error) {
	e, err := s.lookup(ref)
	if err != nil {
		return pod.Image{}, err
	}
	if e == nil {
		return pod.Image{}, fmt.Errorf("image %q: %w", ref, errdefs.ErrNotFound)
	}
	snapshotter, err := s.whole(ctx, e)
	switch {
	case errdefs.IsUnavailable(err):
		return pod.Image{}, fmt.Errorf("image %q: %w", ref, err)
	case err != nil:
		return pod.Image{}, fmt.Errorf("image %q is broken: %w: %w", ref, err, errdefs.ErrNotFound)
	}
	img := pod.Image{
		ID: e.ID, Ref: e.ID, Name: e.ID,
		ChainID: e.ChainID(), Snapshotter: snapshotter, Config: e.Config.Config,
	}
	if len(e.shown.GetRepoDigests()) > 0 {
		img.Ref = e.shown.GetRepoDigests()[0]
	}
	if named, err := parseName(ref); err == nil && s.named(e, named) {
		img.Name = named.String()
	} else if len(e.shown.GetRepoTags()) > 0 {
		img.Name = e.shown.GetRepoTags()[0]
	}
	return img, nil
}

// whole returns the snapshotter that has an image whole: the default one if it does, else
// another that images are pulled for.
func (s *Service) whole(ctx context.Context, e *entry) (string, error) {
	name := s.st.DefaultSnapshotter()
	err := s.check(ctx, e, name)
	if err == nil {
		return name, nil
	}
	for _, other := range s.conf.Load().Snapshotters {
		if other == "" || other == name {
			continue
		}
		otherErr := s.check(ctx, e, other)
		if otherErr == nil {
			return other, nil
		}
		if errdefs.IsUnavailable(otherErr) {
			err = otherErr
		}
	}
	return "", err
}

// named says that a name is one of an image's, and not the beginning of its id.
func (s *Service) named(e *entry, name reference.Named) bool {
	c := s.catalog.Load()
	return c != nil && c.byName[name.String()] != nil && c.byName[name.String()].ID == e.ID
}

func (s *Service) lookup(ref string) (*entry, error) {
	c, err := s.current()
	if err != nil {
		return nil, err
	}
	q, err := parseQuery(ref)
	if err != nil {
		return nil, err
	}
	return c.find(q), nil
}

// check says what of an image is missing that a container needs.
func (s *Service) check(ctx context.Context, e *entry, snapshotter string) error {
	ctx = s.st.Context(ctx)
	for _, b := range e.Blobs {
		if !s.st.BlobPresent(ctx, b) {
			return fmt.Errorf("blob %s: %w", b.Digest, errdefs.ErrNotFound)
		}
	}
	damaged, err := s.st.Damaged(ctx, snapshotter, e.Layers)
	if err != nil {
		return err
	}
	if len(damaged) > 0 {
		return fmt.Errorf("files of layer %s: %w", e.Layers[damaged[0]].ChainID, errdefs.ErrNotFound)
	}
	return nil
}

// snapshotter returns the snapshotter of the runtime handler that an image is for.
// Errors: ErrInvalidArgument if there is no such handler.
func (s *Service) snapshotter(spec *criv1.ImageSpec) (string, error) {
	handlers, asked := s.conf.Load().Snapshotters, spec.GetRuntimeHandler()
	name, known := handlers[asked]
	switch {
	case name != "":
		return name, nil
	case known || asked == "":
		return s.st.DefaultSnapshotter(), nil
	}
	return "", fmt.Errorf("image.runtime_handler %q is not configured, known are %s: %w",
		asked, strings.TrimPrefix(strings.Join(slices.Sorted(maps.Keys(handlers)), ", "), ", "), errdefs.ErrInvalidArgument)
}

// Usage returns the use of the file systems that hold image layers and of those that hold
// the writable layers of containers. The figures of the latter may be some seconds old.
func (s *Service) Usage(ctx context.Context) (images, containers []*criv1.FilesystemUsage, err error) {
	usage, err := s.st.Usage(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, u := range usage {
		if u.Snapshotter != s.st.DefaultSnapshotter() && u.Images.Size == 0 && u.Containers.Inodes == 0 {
			continue
		}
		at := u.At.UnixNano()
		mountpoint := s.st.Mountpoint(u.Snapshotter)
		images = append(images, filesystem(at, mountpoint, u.Images.Size, u.Images.Inodes))
		containers = append(containers, filesystem(at, mountpoint, u.Containers.Size, u.Containers.Inodes))
	}
	return images, containers, nil
}

func filesystem(at int64, mountpoint string, bytes, inodes int64) *criv1.FilesystemUsage {
	return &criv1.FilesystemUsage{
		Timestamp:  at,
		FsId:       &criv1.FilesystemIdentifier{Mountpoint: mountpoint},
		UsedBytes:  &criv1.UInt64Value{Value: uint64(max(bytes, 0))},
		InodesUsed: &criv1.UInt64Value{Value: uint64(max(inodes, 0))},
	}
}
