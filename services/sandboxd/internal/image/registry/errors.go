package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
)

// Classify gives an error of a pull the kind that callers act on: ErrNotFound,
// ErrUnauthenticated, ErrPermissionDenied, ErrResourceExhausted (no space),
// ErrUnavailable (network and server trouble),
// ErrDataLoss (content that is not what its digest says) or context.Canceled. An error that says
// its kind itself, with a method Kind, keeps it.
func Classify(err error) error {
	switch {
	case err == nil:
		return nil
	case NoSpace(err):
		return kind(err, errdefs.ErrResourceExhausted)
	case errors.Is(err, errStalled):
		return unavailable(err)
	case knowsKind(err):
		return err
	case errors.Is(err, context.Canceled):
		return err
	case errors.Is(err, docker.ErrInvalidAuthorization):
		return kind(err, errdefs.ErrUnauthenticated)
	}
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return classifyStatus(err, status)
	}
	switch {
	case errdefs.IsNotFound(err), errdefs.IsInvalidArgument(err), errdefs.IsUnavailable(err),
		errdefs.IsDataLoss(err), errdefs.IsUnauthorized(err), errdefs.IsPermissionDenied(err),
		errdefs.IsNotImplemented(err), errdefs.IsResourceExhausted(err):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF), isNetwork(err):
		return unavailable(err)
	case errdefs.IsFailedPrecondition(err):
		// The content store's word for bytes that do not fit digest or size.
		return kind(err, errdefs.ErrDataLoss)
	}
	return err
}

func classifyStatus(err error, status remoteerrors.ErrUnexpectedStatus) error {
	if text := strings.TrimSpace(string(status.Body)); text != "" && len(text) < 500 {
		err = fmt.Errorf("%w: %s", err, text)
	}
	switch code := status.StatusCode; {
	case code == http.StatusUnauthorized:
		return kind(err, errdefs.ErrUnauthenticated)
	case code == http.StatusForbidden:
		return kind(err, errdefs.ErrPermissionDenied)
	case code == http.StatusNotFound:
		return kind(err, errdefs.ErrNotFound)
	case code == http.StatusTooManyRequests, code == http.StatusRequestTimeout, code >= 500:
		return unavailable(err)
	default:
		return kind(err, errdefs.ErrFailedPrecondition)
	}
}

// NoSpace says that a disk or quota is full.
func NoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

func isNetwork(err error) bool {
	// The kernel's numbers pass for errors of the network; those of a disk are the node's own.
	if e, ok := errors.AsType[net.Error](err); ok {
		if _, number := any(e).(syscall.Errno); !number {
			return true
		}
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET)
}

// Failed classifies an error of a call under ctx. If ctx has ended, the reason of that end is
// the error.
func Failed(ctx context.Context, err error) error {
	why := context.Cause(ctx)
	switch {
	case err == nil:
		return nil
	case why == nil:
		return Classify(err)
	case errors.Is(why, errStalled):
		return unavailable(why)
	case errors.Is(err, why):
		return err
	}
	return fmt.Errorf("%w: %w", why, err)
}

func kind(err, sentinel error) error {
	if errors.Is(errdefs.Resolve(err), sentinel) {
		return err
	}
	return classified{err, sentinel}
}

// classified is an error with a kind that outweighs those of its causes.
type classified struct{ err, kind error }

// Kind returns the kind.
func (c classified) Kind() error { return c.kind }

// knowsKind says that an error is of a kind for itself, whatever its causes are.
func knowsKind(err error) bool {
	_, ok := errors.AsType[interface {
		error
		Kind() error
	}](err)
	return ok
}

// Error implements error.
func (c classified) Error() string { return c.err.Error() + ": " + c.kind.Error() }

// Unwrap returns the kind first: who looks for one takes the first.
func (c classified) Unwrap() []error { return []error{c.kind, c.err} }

func unavailable(err error) error { return kind(err, errdefs.ErrUnavailable) }
