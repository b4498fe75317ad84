package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// maxTrailer bounds what may follow the end of a layer's archive, in bytes. A few thousand are
// usual; what goes on for ever would never be known to be wrong.
const maxTrailer = 64 << 20

// Decoder turns the content of a layer into a tar archive, which the caller owes a Close.
type Decoder interface {
	Tar(ctx context.Context, desc ocispec.Descriptor, r io.Reader) (io.ReadCloser, error)
}

// Applier returns what extracts layers, as the decoder reads them, into snapshots. Its errors
// tell a system that refuses (ErrInternal, or as it is for a full disk) from a layer that is
// malformed (ErrDataLoss); ErrFailedPrecondition is the decoder's.
func (s *Storage) Applier(d Decoder) diff.Applier {
	return applier{s.Content(), d}
}

type applier struct {
	content content.Provider
	decoder Decoder
}

// Apply implements diff.Applier.
func (a applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, _ ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	got, err := a.apply(ctx, desc, mounts)
	if err == nil || ctx.Err() != nil {
		return got, err
	}
	errno, system := errors.AsType[syscall.Errno](err)
	switch {
	case errno == syscall.ENOSPC || errno == syscall.EDQUOT || errdefs.IsFailedPrecondition(err):
		return got, err
	case system && !layersFault(errno) && !linkToFolder(err):
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

// linkToFolder says that a layer has a hard link to a folder.
func linkToFolder(err error) bool {
	_, link := errors.AsType[*os.LinkError](err)
	return link && errors.Is(err, syscall.EPERM)
}

func (a applier) apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount) (_ ocispec.Descriptor, err error) {
	ra, err := a.content.ReaderAt(ctx, desc)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer ra.Close()
	tar, err := a.decoder.Tar(ctx, desc, content.NewReader(ra))
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
	switch trailer, err := io.Copy(io.Discard, io.LimitReader(counted, maxTrailer+1)); {
	case err != nil:
		return ocispec.Descriptor{}, err
	case trailer > maxTrailer:
		return ocispec.Descriptor{}, fmt.Errorf("more than %d bytes after the end of the archive", maxTrailer)
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Size: counted.n, Digest: hash.Digest()}, nil
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
