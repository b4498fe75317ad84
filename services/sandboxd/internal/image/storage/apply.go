package storage

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/diff/apply"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Applier returns what extracts layers into snapshots. Its errors tell a system that refuses
// (ErrInternal, or as it is for a full disk) from a layer that is malformed (ErrDataLoss).
func (s *Storage) Applier() diff.Applier {
	return applier{apply.NewFileSystemApplier(s.Content())}
}

type applier struct {
	diff.Applier
}

// Apply implements diff.Applier.
func (a applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	got, err := a.Applier.Apply(ctx, desc, mounts, opts...)
	if err == nil || ctx.Err() != nil {
		return got, err
	}
	errno, system := errors.AsType[syscall.Errno](err)
	switch {
	case errno == syscall.ENOSPC || errno == syscall.EDQUOT:
		return got, err
	case system:
		return got, fmt.Errorf("%w: %w", err, errdefs.ErrInternal)
	}
	return got, fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
}
