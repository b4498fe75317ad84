package registry

import (
	"bytes"
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
	// maxBlobTries is how often a blob is asked for, each time from where it broke off; a try
	// that brought something does not count up to the larger number.
	maxBlobTries     = 5
	maxBlobTriesEver = 50
	// maxWrongBytes is how often content with a wrong digest or size is thrown away and
	// fetched anew.
	maxWrongBytes = 2
	// rangedFrom is from how many ranges on a blob is fetched in ranges side by side.
	rangedFrom = 3
)

// Blob brings a blob into the store, unless it is there, and goes on where an earlier
// attempt broke off. What has the wrong digest or size is thrown away; what is good so far
// stays in the store if a later attempt can make use of it ([Resumable]). Calls for the same
// blob must not overlap within one session. Errors as of [Classify].
func (s *Session) Blob(ctx context.Context, store content.Store, desc ocispec.Descriptor) error {
	if desc.Size == 0 {
		return Failed(ctx, content.WriteBlob(ctx, store, remotes.MakeRefKey(ctx, desc), bytes.NewReader(nil), desc))
	}
	t := bringing{session: s, store: store, desc: desc, ranged: s.takeRanges(desc)}
	defer func() { s.giveRanges(t.ranged) }()
	var err error
	for range maxBlobTriesEver {
		fetcher := s.fetcher
		if t.ranged {
			fetcher = s.ranges
		}
		err = remotes.Fetch(context.WithValue(ctx, sizeKey{}, desc.Size), store, fetcher, desc)
		if err == nil || errdefs.IsAlreadyExists(err) {
			return nil
		}
		again, abortErr := t.again(ctx, err)
		if abortErr != nil {
			return abortErr
		}
		if !again {
			break
		}
	}
	err = Failed(ctx, fmt.Errorf("blob %s: %w", desc.Digest, err))
	if !Resumable(err) {
		err = errors.Join(err, s.abort(ctx, store, desc))
	}
	return err
}

// bringing is what has come of one call of Blob so far.
type bringing struct {
	session *Session
	store   content.Store
	desc    ocispec.Descriptor
	ranged  bool
	idle    int   // tries since the last that brought something
	wrong   int   // tries that brought something else
	have    int64 // bytes
}

// again says whether another try is worthwhile after one that ended with err, and throws
// away what cannot be gone on from.
func (t *bringing) again(ctx context.Context, err error) (bool, error) {
	if ctx.Err() != nil || NoSpace(err) {
		return false, nil //nolint:nilerr // an error only if throwing away failed
	}
	broken := resumable(err)
	bad := !broken && wrongBytes(err)
	if bad {
		if err := t.session.abort(ctx, t.store, t.desc); err != nil {
			return false, err
		}
	}
	if got := t.session.offset(ctx, t.store, t.desc); got > t.have {
		t.have, t.idle = got, 0
	}
	t.idle++
	switch {
	case t.ranged:
		// Whatever is wrong may be due to the ranges, or to their number.
		t.session.giveRanges(true)
		t.ranged = false
		return true, nil
	case (bad || broken && t.idle > 1) && t.session.blame(t.desc.Digest):
		// The next host may do better.
		t.idle = 0
		return true, nil
	case broken:
		return t.idle < maxBlobTries, nil
	}
	t.wrong++
	return t.wrong < maxWrongBytes && worthwhile(err), nil
}

// takeRanges says whether a blob is to be fetched in ranges. Only one at a time is, which
// bounds the memory of a pull.
func (s *Session) takeRanges(desc ocispec.Descriptor) bool {
	return s.ranges != nil && desc.Size/rangedFrom >= s.chunk && s.ranged.CompareAndSwap(false, true)
}

func (s *Session) giveRanges(taken bool) {
	if taken {
		s.ranged.Store(false)
	}
}

// offset returns how much of a blob has been received.
func (s *Session) offset(ctx context.Context, store content.Store, desc ocispec.Descriptor) int64 {
	st, err := store.Status(ctx, remotes.MakeRefKey(ctx, desc))
	if err != nil {
		return 0 // nothing
	}
	return st.Offset
}

// abort throws away what was received of a blob.
func (s *Session) abort(ctx context.Context, store content.Store, desc ocispec.Descriptor) error {
	ctx = context.WithoutCancel(ctx)
	if err := store.Abort(ctx, remotes.MakeRefKey(ctx, desc)); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("partial blob %s: %w", desc.Digest, err)
	}
	return nil
}

// Resumable says that a pull that ended with a classified error may go on with what it has
// brought so far: the registry or the network failed, or the caller went away.
func Resumable(err error) bool {
	return !NoSpace(err) && (errdefs.IsUnavailable(err) || errdefs.IsCanceled(err))
}

// resumable says that a transfer broke off and what came so far may be good.
func resumable(err error) bool {
	return errors.Is(err, io.ErrUnexpectedEOF)
}

// wrongBytes says that what came does not fit digest or size, that the server disagrees
// about what there is after it, or that its answer makes no sense.
func wrongBytes(err error) bool {
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return status.StatusCode == http.StatusRequestedRangeNotSatisfiable || status.StatusCode == http.StatusPartialContent
	}
	return errdefs.IsFailedPrecondition(err) || errors.Is(errdefs.Resolve(Classify(err)), errdefs.ErrUnknown)
}

// worthwhile says that another transfer may go better than the last.
func worthwhile(err error) bool { return wrongBytes(err) || isNetwork(err) }
