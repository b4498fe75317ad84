// Package verify asks an operator's programs whether images may be pulled, in the form of
// containerd's image verifiers.
package verify

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/pkg/imageverifier/bindir"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// maxReason bounds what is passed on of a verifier's words, in bytes. They end in events of
// the pod.
const maxReason = 1 << 10

// Programs are asked whether an image may be pulled.
type Programs struct {
	// Dir is the folder of the programs, all of which must accept an image. It is read at each
	// pull. Empty means that nobody is asked.
	Dir string
	// Max is how many programs there may be, Timeout how long each may take.
	Max     int
	Timeout time.Duration
}

// Error is that of an image for which there is no verdict or a bad one.
type Error struct{ error }

// Unwrap returns the reason.
func (e Error) Unwrap() error { return e.error }

// Ask asks for the verdict on what a name stands for. A folder that cannot be used as it should
// refuses every image: to go on without it would bring images that the operator wants none of.
// Errors: Error with ErrPermissionDenied for a refusal and if there is no verdict, or the reason
// of the end of ctx.
func (p Programs) Ask(ctx context.Context, name string, desc ocispec.Descriptor) error {
	if p.Dir == "" {
		return nil
	}
	err := p.ask(ctx, name, desc)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return Error{fmt.Errorf("%s: %w: %w", desc.Digest, errdefs.ErrPermissionDenied, err)}
}

// ask returns an error without a class, which says why an image is not accepted.
func (p Programs) ask(ctx context.Context, name string, desc ocispec.Descriptor) error {
	programs, err := os.ReadDir(p.Dir)
	if err == nil && (len(programs) == 0 || len(programs) > p.Max) {
		err = fmt.Errorf("%s has %d programs, 1 to %d wanted", p.Dir, len(programs), p.Max)
	}
	if err != nil {
		return fmt.Errorf("image verifiers: %w", err)
	}
	cfg := &bindir.Config{BinDir: p.Dir, MaxVerifiers: p.Max}
	if err := cfg.PerVerifierTimeout.UnmarshalText([]byte(p.Timeout.String())); err != nil { // its type cannot be named here
		return fmt.Errorf("image verifiers: %w", err)
	}
	verdict, err := bindir.NewImageVerifier(cfg).VerifyImage(ctx, name, desc)
	if err != nil {
		return fmt.Errorf("image verifiers: %w", err)
	}
	if !verdict.OK {
		return errors.New(shortened(verdict.Reason))
	}
	return nil
}

func shortened(reason string) string {
	if len(reason) > maxReason {
		reason = reason[:maxReason] + " (cut off)"
	}
	return strings.ToValidUTF8(reason, "?")
}
