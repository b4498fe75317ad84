package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Applier returns what extracts layers into snapshots. Its errors tell a system that refuses
// (ErrInternal, or as it is for a full disk) from a layer that is malformed (ErrDataLoss).
func (s *Storage) Applier() diff.Applier {
	return applier{s.Content()}
}

type applier struct {
	content content.Provider
}

// Apply implements diff.Applier.
func (a applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	got, err := a.apply(ctx, desc, mounts, opts...)
	if err == nil || ctx.Err() != nil {
		return got, err
	}
	errno, system := errors.AsType[syscall.Errno](err)
	switch {
	case errno == syscall.ENOSPC || errno == syscall.EDQUOT:
		return got, err
	case system && !layersFault(errno):
		return got, fmt.Errorf("%w: %w", err, errdefs.ErrInternal)
	}
	return got, fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
}

// layersFault says that the kernel refused names or kinds of a layer, not the work as such.
func layersFault(errno syscall.Errno) bool {
	switch errno {
	case syscall.ENAMETOOLONG, syscall.ELOOP, syscall.ENOTDIR, syscall.EISDIR, syscall.ENOENT, syscall.EINVAL:
		return true
	default:
		return false
	}
}

func (a applier) apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (_ ocispec.Descriptor, err error) {
	var config diff.ApplyConfig
	for _, o := range opts {
		if err := o(ctx, desc, &config); err != nil {
			return ocispec.Descriptor{}, err
		}
	}
	ra, err := a.content.ReaderAt(ctx, desc)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer ra.Close()
	tar, err := uncompressed(ctx, desc.MediaType, content.NewReader(ra), config)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer tar.Close()
	hash := digest.Canonical.Digester()
	counted := &counter{r: io.TeeReader(tar, hash.Hash())}
	if err := extract(ctx, mounts, counted); err != nil {
		return ocispec.Descriptor{}, err
	}
	// What follows the end of the archive counts too.
	if _, err := io.Copy(io.Discard, counted); err != nil {
		return ocispec.Descriptor{}, err
	}
	if p, ok := tar.(interface{ Err() error }); ok && p.Err() != nil {
		return ocispec.Descriptor{}, p.Err()
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Size: counted.n, Digest: hash.Digest()}, nil
}

// uncompressed turns a blob into a tar stream.
func uncompressed(ctx context.Context, mediaType string, r io.Reader, config diff.ApplyConfig) (diff.StreamProcessor, error) {
	p := diff.NewProcessorChain(mediaType, r)
	for {
		next, err := diff.GetProcessor(ctx, p, config.ProcessorPayloads)
		if err != nil {
			return nil, fmt.Errorf("layer of type %s: %w", mediaType, err)
		}
		p = next
		if p.MediaType() == ocispec.MediaTypeImageLayer {
			return p, nil
		}
	}
}

// counter counts what was read.
type counter struct {
	r io.Reader
	n int64
}

// Read implements io.Reader.
func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}
