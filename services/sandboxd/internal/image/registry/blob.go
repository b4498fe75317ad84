package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/remotes"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// maxBlobTries is how often a blob is asked for, each time from where it broke off.
	maxBlobTries = 5
	// maxWrongBytes is how often content with a wrong digest or size is thrown away and
	// fetched anew.
	maxWrongBytes = 2
)

// Blob brings a blob into the store, unless it is there. What was received of it is thrown
// away when it cannot be completed, so that the next attempt begins afresh. Calls for the
// same blob must not overlap within one session. Errors as of [Classify].
func (s *Session) Blob(ctx context.Context, store content.Store, desc ocispec.Descriptor) error {
	var err error
	for try, wrong := 1, 0; try <= maxBlobTries; try++ {
		err = remotes.Fetch(ctx, store, s.fetcher, desc)
		if err == nil || errdefs.IsAlreadyExists(err) {
			return nil
		}
		if ctx.Err() != nil || !resumable(err) {
			if wrong++; wrong >= maxWrongBytes || ctx.Err() != nil || !worthwhile(err) {
				break
			}
			if err := s.abort(ctx, store, desc); err != nil {
				return err
			}
		}
	}
	if abortErr := s.abort(ctx, store, desc); abortErr != nil {
		err = errors.Join(err, abortErr)
	}
	return Failed(ctx, fmt.Errorf("blob %s: %w", desc.Digest, err))
}

// abort throws away what was received of a blob.
func (s *Session) abort(ctx context.Context, store content.Store, desc ocispec.Descriptor) error {
	ctx = context.WithoutCancel(ctx)
	if err := store.Abort(ctx, remotes.MakeRefKey(ctx, desc)); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("partial blob %s: %w", desc.Digest, err)
	}
	return nil
}

// resumable says that a transfer broke off and what came so far may be good.
func resumable(err error) bool {
	return errors.Is(err, io.ErrUnexpectedEOF)
}

// worthwhile says that a fresh transfer may go better than the last.
func worthwhile(err error) bool {
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return status.StatusCode == http.StatusRequestedRangeNotSatisfiable || status.StatusCode == http.StatusPartialContent
	}
	return errdefs.IsFailedPrecondition(err) || isNetwork(err)
}
