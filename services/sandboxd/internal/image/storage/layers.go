package storage

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/erofs"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/extract"
)

// releaseTimeout bounds the clean-up after reading.
const releaseTimeout = 30 * time.Second

// Layer is one layer of an image, with the name of the snapshot that holds it and all below.
type Layer struct {
	ChainID digest.Digest
	DiffID  digest.Digest
	Blob    ocispec.Descriptor
}

// Damaged returns the positions of the layers whose files are gone although their snapshots
// are known. Errors: ErrNotFound if a snapshot is not known at all.
func (s *Storage) Damaged(ctx context.Context, snapshotter string, layers []Layer) ([]int, error) {
	sn, name, err := s.Snapshotter(snapshotter)
	if err != nil {
		return nil, err
	}
	var damaged []int
	for i, l := range layers {
		info, err := sn.Stat(ctx, l.ChainID.String())
		if err != nil {
			return nil, fmt.Errorf("layer %s in %s: %w", l.ChainID, name, err)
		}
		dir := info.Labels[extract.FolderLabel]
		if dir == "" {
			continue
		}
		if name == Erofs {
			dir = erofs.Blob(dir)
		}
		if _, err := os.Lstat(dir); err != nil {
			damaged = append(damaged, i)
		}
	}
	return damaged, nil
}

// Restore extracts the layer at position i again, in the place where its files were. All
// below it must be whole.
func (s *Storage) Restore(ctx context.Context, applier diff.Applier, snapshotter string, layers []Layer, i int) error {
	sn, name, err := s.Snapshotter(snapshotter)
	if err != nil {
		return err
	}
	dirs, err := extract.Folders(ctx, sn, layers[i].ChainID.String())
	if err != nil {
		return fmt.Errorf("snapshotter %s: %w", name, err)
	}
	upper, lower := dirs[0], dirs[1:]
	switch {
	case upper != "" && name == Erofs:
		return s.renew(ctx, applier, layers[i], upper, lower)
	case upper == "":
		return fmt.Errorf("layer %s in %s cannot be restored: %w", layers[i].ChainID, name, errdefs.ErrNotImplemented)
	}
	if err := os.MkdirAll(upper, 0o755); err != nil {
		return fmt.Errorf("layer %s: %w", layers[i].ChainID, err)
	}
	if err := extractAgain(ctx, applier, layers[i], upper, lower); err != nil {
		// An empty folder would pass for a whole layer.
		_ = os.RemoveAll(upper)
		return fmt.Errorf("layer %s: %w", layers[i].ChainID, err)
	}
	return nil
}

// extractAgain extracts a layer into its folder.
func extractAgain(ctx context.Context, applier diff.Applier, l Layer, upper string, lower []string) error {
	if err := extract.TakeOwner(upper, lower); err != nil {
		return err
	}
	got, err := applier.Apply(ctx, l.Blob, extract.Over(upper, lower))
	if err == nil && got.Digest != l.DiffID {
		err = fmt.Errorf("content is %s, not %s: %w", got.Digest, l.DiffID, errdefs.ErrDataLoss)
	}
	return err
}

// renew makes the file of a layer again.
func (s *Storage) renew(ctx context.Context, applier diff.Applier, l Layer, upper string, lower []string) error {
	release, err := s.erofs.Hold(ctx, lower)
	if err != nil {
		return err
	}
	defer release()
	err = s.erofs.Renew(ctx, upper, func() error { return extractAgain(ctx, applier, l, upper, lower) })
	if err != nil {
		return fmt.Errorf("layer %s: %w", l.ChainID, err)
	}
	return nil
}

// ReadOnly calls fn with the mounts that show the layers up to chainID for reading. They are
// valid until fn returns. Errors: ErrNotFound if a layer is not known.
func (s *Storage) ReadOnly(ctx context.Context, snapshotter, chainID string, fn func([]mount.Mount) error) (err error) {
	sn, name, err := s.Snapshotter(snapshotter)
	if err != nil {
		return err
	}
	if name == Overlay || name == Erofs {
		dirs, release, err := s.folders(ctx, name, chainID)
		if err != nil {
			return err
		}
		defer release()
		return fn(s.overlayReadOnly(dirs))
	}
	ctx, held, err := s.Lease(ctx, "")
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		err = errors.Join(err, held.Release(ctx))
		s.CollectSoon()
	}()
	mounts, err := sn.View(ctx, "view-"+rand.Text(), chainID)
	if err != nil {
		return fmt.Errorf("layer %s in %s: %w", chainID, name, err)
	}
	return fn(mounts)
}

// overlayReadOnly puts layers together without a record in the database.
func (s *Storage) overlayReadOnly(dirs []string) []mount.Mount {
	if len(dirs) == 1 {
		return []mount.Mount{{Type: "bind", Source: dirs[0], Options: []string{"ro", "rbind"}}}
	}
	options := []string{"ro", "lowerdir=" + strings.Join(dirs, ":")}
	if s.target.UserNotes {
		options = append(options, userNotes)
	}
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: options}}
}

// BlobPresent says whether a blob is known and its file has the right size. The content is
// not read.
func (s *Storage) BlobPresent(ctx context.Context, desc ocispec.Descriptor) bool {
	info, err := s.Content().Info(ctx, desc.Digest)
	if err != nil || info.Size != desc.Size {
		return false
	}
	file, err := s.blobs.Info(ctx, desc.Digest)
	return err == nil && file.Size == desc.Size
}

// BlobIntact says whether a blob is there and its content has its digest.
func (s *Storage) BlobIntact(ctx context.Context, desc ocispec.Descriptor) bool {
	if !s.BlobPresent(ctx, desc) {
		return false
	}
	ra, err := s.blobs.ReaderAt(ctx, desc)
	if err != nil {
		return false
	}
	defer ra.Close()
	got, err := desc.Digest.Algorithm().FromReader(content.NewReader(ra))
	return err == nil && got == desc.Digest
}

// Discard forgets a blob and removes its file, so that it is fetched again.
func (s *Storage) Discard(ctx context.Context, dgst digest.Digest) error {
	if err := s.Content().Delete(ctx, dgst); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("blob %s: %w", dgst, err)
	}
	if err := s.blobs.Delete(ctx, dgst); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("blob %s: %w", dgst, err)
	}
	return nil
}
