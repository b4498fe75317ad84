package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	eventstypes "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	eventv1 "github.com/crisp-cri/crisp/proto/gen/crisp/event/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/assembly"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/progress"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry/login"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/snapproxy"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/verify"
)

// cleanupTimeout bounds what is done for a pull after its end.
const cleanupTimeout = time.Minute

// request is one pull.
type request struct {
	name        reference.Named
	creds       login.Credentials
	snapshotter string
}

// key is the same for pulls that may share one result. Credentials are part of it: who may
// not pull an image must not get it from somebody else's pull.
func (r request) key() string {
	secret := sha256.Sum256([]byte(strings.Join([]string{r.creds.Username, r.creds.Secret, r.creds.Token, r.creds.Server}, "\x00")))
	return strings.Join([]string{r.name.String(), r.snapshotter, hex.EncodeToString(secret[:])}, " ")
}

// work names a pull for the next attempt at it, which may be one with other credentials.
func (r request) work() string {
	sum := sha256.Sum256([]byte(r.name.String() + " " + r.snapshotter))
	return hex.EncodeToString(sum[:])
}

// Pull brings an image to the node, unpacked, and returns its id. Identical pulls at the same
// time are one. When ctx ends, Pull returns at once; the work goes on only if others wait for
// it. What the pod is does not matter to a pull; the parameter is there because some
// runtimes choose by it.
//
// Errors: ErrInvalidArgument, ErrNotFound, ErrUnauthenticated, ErrPermissionDenied,
// ErrResourceExhausted (disk full), ErrDataLoss (content that does not fit its digest) and
// ErrUnavailable, whose text begins with kubelet's reason RegistryUnavailable unless a
// snapshotter is away. The text is
// SignatureValidationFailed at its beginning if verifiers refuse the image or cannot be asked
// (ErrPermissionDenied).
func (s *Service) Pull(ctx context.Context, spec *criv1.ImageSpec, auth *criv1.AuthConfig, _ *criv1.PodSandboxConfig) (string, error) {
	if _, err := s.current(); err != nil {
		return "", err
	}
	name, err := parseName(spec.GetImage())
	if err != nil {
		return "", err
	}
	creds, err := login.ParseAuth(auth)
	if err != nil {
		return "", err
	}
	snapshotter, err := s.snapshotter(spec)
	if err != nil {
		return "", err
	}
	req := request{name: name, creds: creds, snapshotter: snapshotter}
	return s.pulls.do(ctx, req.key(), func(ctx context.Context) (string, error) {
		ctx, span := s.tracer.Start(ctx, "sandboxd.image.pull", trace.WithAttributes(attribute.String("image", name.String())))
		defer span.End()
		id, err := s.pull(s.st.Context(ctx), req)
		if err == nil {
			return id, nil
		}
		span.SetStatus(codes.Error, "pull failed")
		if _, ok := errors.AsType[verify.Error](err); ok {
			return "", fmt.Errorf("%w: pull image %q: %w", crierrors.ErrSignatureValidationFailed, name, err)
		}
		if _, away := errors.AsType[*snapproxy.Error](err); errdefs.IsUnavailable(err) && !away {
			return "", fmt.Errorf("%w: pull image %q: %w", crierrors.ErrRegistryUnavailable, name, err)
		}
		return "", fmt.Errorf("pull image %q: %w", name, err)
	})
}

// pull does the work of one pull and cleans up after a failed one.
func (s *Service) pull(ctx context.Context, req request) (id string, err error) {
	base, conf := ctx, s.conf.Load()
	steps := progress.New(req.name.String(), s.st.Content(), func(ctx context.Context, e *eventv1.ImageProgress) { s.tell(ctx, progress.Topic, e) })
	ended := conf.Metrics.Begin(steps)
	defer func() {
		steps.End(base, id, err)
		ended(err)
	}()
	ctx, session, err := registry.Open(ctx, registry.Config{
		HostDirs: conf.HostDirs, AuthFile: conf.AuthFile, ProgressTimeout: conf.ProgressTimeout, UserAgent: conf.UserAgent,
		MaxConcurrentDownloads: conf.MaxConcurrentDownloads, RangeSize: conf.RangeSize,
	}, req.name, req.creds)
	if err != nil {
		return "", err
	}
	defer session.Close()
	root, err := s.resolve(ctx, session)
	if err != nil {
		return "", err
	}
	ctx, held, err := s.st.Lease(ctx, req.work())
	if err != nil {
		return "", registry.Classify(err)
	}
	defer func() { s.settle(base, held, err) }()

	pull := assembly.Pull{Session: session, Name: req.name.String(), Snapshotter: req.snapshotter, Steps: steps}
	c, root, err := s.assembler.Bring(ctx, pull, root, conf.assembly())
	if err != nil {
		return "", registry.Failed(ctx, err)
	}
	if err := s.st.Sync(req.snapshotter); err != nil {
		return "", registry.Classify(err)
	}
	if err := s.record(ctx, req.name, root, c.ID); err != nil {
		return "", registry.Classify(err)
	}
	return c.ID, s.reload(ctx)
}

func (s *Service) resolve(ctx context.Context, session *registry.Session) (ocispec.Descriptor, error) {
	ctx, span := s.tracer.Start(ctx, "sandboxd.image.resolve")
	defer span.End()
	root, err := session.Resolve(ctx)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	return root, err
}

// settle ends the lease of a pull. What it has brought is kept for the next attempt if the
// registry failed or the process is told to stop; nothing is if the image is no good, there is
// no space, or the callers have left.
func (s *Service) settle(ctx context.Context, held *storage.Held, failure error) {
	why := context.Cause(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	left := errors.Is(why, errAbandoned) && !errdefs.IsUnavailable(why)
	if failure != nil && !left && registry.Resumable(failure) {
		if err := held.Keep(ctx); err != nil {
			s.log.WarnContext(ctx, "what a failed pull has brought is not kept", slog.Any("error", err))
		}
		s.st.CollectSoon()
		return
	}
	if err := held.Release(ctx); err != nil {
		s.log.WarnContext(ctx, "lease of a pull not released", slog.Any("error", err)) // it runs out
	}
	if failure == nil {
		if held.Resumed || s.conf.Load().DiscardLayers {
			s.st.CollectSoon()
		}
		return
	}
	if registry.NoSpace(failure) {
		if err := s.st.DropKept(ctx); err != nil {
			s.log.WarnContext(ctx, "what failed pulls have brought is not given up", slog.Any("error", err))
		}
	}
	if err := s.st.Collect(ctx); err != nil {
		s.log.WarnContext(ctx, "leftovers of a failed pull not removed yet", slog.Any("error", err))
	}
}

// record gives an image its names, in one transaction.
func (s *Service) record(ctx context.Context, name reference.Named, root ocispec.Descriptor, id string) error {
	byDigest, err := reference.WithDigest(reference.TrimNamed(name), root.Digest)
	if err != nil {
		return fmt.Errorf("image %q: %w", name, err)
	}
	names := []string{id, byDigest.String()}
	if _, tagged := name.(reference.Tagged); tagged {
		names = append(names, name.String())
	}
	var created, updated []string
	err = s.st.Update(ctx, func(ctx context.Context) error {
		created, updated = nil, nil
		for _, n := range names {
			old, err := s.st.Images().Get(ctx, n)
			switch {
			case errdefs.IsNotFound(err):
				_, err = s.st.Images().Create(ctx, images.Image{Name: n, Target: root})
				created = append(created, n)
			case err == nil && old.Target.Digest != root.Digest:
				_, err = s.st.Images().Update(ctx, images.Image{Name: n, Target: root}, "target")
				updated = append(updated, n)
			}
			if err != nil {
				return fmt.Errorf("image %q: %w", n, err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, n := range created {
		s.tell(ctx, "/images/create", &eventstypes.ImageCreate{Name: n})
	}
	for _, n := range updated {
		s.tell(ctx, "/images/update", &eventstypes.ImageUpdate{Name: n})
	}
	return nil
}
