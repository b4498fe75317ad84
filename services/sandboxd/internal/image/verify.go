package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/pkg/imageverifier/bindir"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
)

// maxReason bounds what is passed on of a verifier's words, in bytes. They end in events of
// the pod.
const maxReason = 1 << 10

// Verifiers are programs that are asked whether an image may be pulled, in the form of
// containerd's image verifiers.
type Verifiers struct {
	// Dir is the folder of the programs, all of which must accept an image. It is read at each
	// pull. Empty means that nobody is asked.
	Dir string
	// Max is how many programs there may be, Timeout how long each may take.
	Max     int
	Timeout time.Duration
}

// unverified is the error of an image that no verdict or a bad one was found for.
type unverified struct{ error }

func (u unverified) Unwrap() error { return u.error }

// verify asks the verifiers for their verdict on what a name stands for. A folder that cannot
// be used as it should refuses every image: to go on without it would bring images that the
// operator wants none of. Errors: unverified with ErrPermissionDenied for a refusal and if
// there is no verdict, or the reason of the end of ctx.
func (s *Service) verify(ctx context.Context, name reference.Named, desc ocispec.Descriptor) error {
	v := s.conf.Load().Verifiers
	if v.Dir == "" {
		return nil
	}
	ctx, span := s.tracer.Start(ctx, "sandboxd.image.verify")
	defer span.End()
	err := v.ask(ctx, name.String(), desc)
	failed(span, err)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return registry.Failed(ctx, err)
	}
	return unverified{fmt.Errorf("%s: %w: %w", desc.Digest, errdefs.ErrPermissionDenied, err)}
}

// ask returns an error without a class, which says why an image is not accepted.
func (v Verifiers) ask(ctx context.Context, name string, desc ocispec.Descriptor) error {
	programs, err := os.ReadDir(v.Dir)
	if err == nil && (len(programs) == 0 || len(programs) > v.Max) {
		err = fmt.Errorf("%s has %d programs, 1 to %d wanted", v.Dir, len(programs), v.Max)
	}
	if err != nil {
		return fmt.Errorf("image verifiers: %w", err)
	}
	cfg := &bindir.Config{BinDir: v.Dir, MaxVerifiers: v.Max}
	if err := cfg.PerVerifierTimeout.UnmarshalText([]byte(v.Timeout.String())); err != nil { // its type cannot be named here
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
