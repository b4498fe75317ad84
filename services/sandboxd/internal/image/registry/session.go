package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/containerd/v2/core/transfer"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/pelletier/go-toml/v2"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/registry/login"
)

// Config says how registries are reached.
type Config struct {
	// HostDirs are folders of host configuration (hosts.toml), the first that knows a host
	// is taken. They are read for every session.
	HostDirs []string
	// AuthFile is a file in the form of docker's config.json with credentials for pulls that
	// bring none; empty means none. It is read for every session.
	AuthFile string
	// ProgressTimeout is how long a request may stay without a byte; 0 means for ever.
	ProgressTimeout time.Duration
	// UserAgent is sent with every request; empty means containerd's.
	UserAgent string
	// MaxConcurrentDownloads bounds the requests for one blob that are under way at a time.
	MaxConcurrentDownloads int
	// RangeSize is the size in bytes of the ranges in which a big blob is fetched, several
	// side by side; 0 means that blobs are fetched whole.
	RangeSize int
	// MirrorPatience is how long a mirror may stay without an answer or a byte until the next
	// host is asked; 0 means 10 seconds or a third of ProgressTimeout, whichever is less. The
	// last host has the whole of ProgressTimeout.
	MirrorPatience time.Duration
}

// defaultPatience is how long a mirror is waited for unless configured.
const defaultPatience = 10 * time.Second

// Session is the conversation with the hosts of one image's registry during one pull. It is
// safe for concurrent use.
type Session struct {
	name     reference.Named
	resolver remotes.Resolver
	fetcher  remotes.Fetcher
	ranges   remotes.Fetcher // of big blobs; nil: none
	chunk    int64           // size of a range
	ranged   atomic.Bool     // ranges are in use
	mirrors  []*mirror
	idle     []func()
}

// Open prepares a session for an image name. The returned context ends when the session
// stalls or is closed, and must be used for all its calls. The caller owes a Close.
// Errors: ErrFailedPrecondition (host configuration, file of credentials).
func Open(ctx context.Context, cfg Config, name reference.Named, creds login.Credentials) (context.Context, *Session, error) {
	s := &Session{name: name}
	moves := newProgress()
	hosts, err := s.hosts(ctx, cfg, creds, moves)
	if err != nil {
		return nil, nil, err
	}
	header := http.Header{}
	if cfg.UserAgent != "" {
		header.Set("User-Agent", cfg.UserAgent)
	}
	s.resolver = docker.NewResolver(docker.ResolverOptions{
		Hosts:   func(string) ([]docker.RegistryHost, error) { return hosts, nil },
		Headers: header,
	})
	if s.fetcher, err = s.resolver.Fetcher(ctx, name.String()); err != nil {
		return nil, nil, fmt.Errorf("image %q: %w", name, err)
	}
	if s.ranges, err = s.rangeFetcher(ctx, cfg); err != nil {
		return nil, nil, fmt.Errorf("image %q: %w", name, err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	if cfg.ProgressTimeout > 0 {
		watch.Go(func() { moves.watch(ctx, cfg.ProgressTimeout, cancel) })
	}
	s.idle = append(s.idle, func() { cancel(context.Canceled); watch.Wait() })
	return ctx, s, nil
}

// rangeFetcher returns what fetches a blob in several ranges at a time; nil if that is not
// wanted.
func (s *Session) rangeFetcher(ctx context.Context, cfg Config) (remotes.Fetcher, error) {
	tunable, ok := s.resolver.(remotes.ResolverWithOptions)
	if !ok || cfg.RangeSize <= 0 || cfg.MaxConcurrentDownloads < 2 {
		return nil, nil //nolint:nilnil // without ranges there is no fetcher of them
	}
	s.chunk = int64(cfg.RangeSize)
	tunable.SetOptions(
		transfer.WithMaxConcurrentDownloads(cfg.MaxConcurrentDownloads),
		transfer.WithConcurrentLayerFetchBuffer(cfg.RangeSize),
	)
	return s.resolver.Fetcher(ctx, s.name.String())
}

// hosts finds the hosts of the registry, mirrors first, each with a client of its own for
// the session.
func (s *Session) hosts(ctx context.Context, cfg Config, creds login.Credentials, moves *progress) ([]docker.RegistryHost, error) {
	registry := reference.Domain(s.name)
	wrap := func(c *http.Client) error {
		if closer, ok := c.Transport.(interface{ CloseIdleConnections() }); ok {
			s.idle = append(s.idle, closer.CloseIdleConnections)
		}
		if _, done := c.Transport.(*transport); !done {
			c.Transport = newTransport(c.Transport, moves)
		}
		return nil
	}
	hosts, err := config.ConfigureHosts(ctx, config.HostOptions{
		HostDir:      hostDir(cfg.HostDirs),
		UpdateClient: wrap,
	})(registry)
	if err != nil {
		return nil, fmt.Errorf("host configuration of %q: %w: %w", registry, err, errdefs.ErrFailedPrecondition)
	}
	own := creds.For
	if creds == (login.Credentials{}) && cfg.AuthFile != "" {
		known, err := login.ReadFile(cfg.AuthFile)
		if err != nil {
			return nil, err
		}
		own = func(host string) login.Credentials { return known.For(host, reference.Path(s.name)) }
	}
	patience := cfg.MirrorPatience
	if patience <= 0 {
		patience = defaultPatience
		if limit := cfg.ProgressTimeout / 3; limit > 0 {
			patience = min(patience, limit)
		}
	}
	for i := range hosts {
		m := &mirror{host: hosts[i].Host, next: hosts[i].Client.Transport}
		if i < len(hosts)-1 {
			m.patience = patience
			s.mirrors = append(s.mirrors, m)
		}
		client := *hosts[i].Client
		client.Transport = m
		hosts[i].Client = &client
		hosts[i].Authorizer = login.NewAuthorizer(hosts[i], own(hosts[i].Host))
	}
	return hosts, nil
}

// hostDir looks through the configuration folders in their order. A file that is no TOML is
// an error: to go on without it would ask hosts that the operator may not want to be asked.
func hostDir(dirs []string) func(string) (string, error) {
	return func(host string) (string, error) {
		for _, dir := range dirs {
			found, err := config.HostDirFromRoot(dir)(host)
			if errdefs.IsNotFound(err) {
				continue
			}
			if err != nil {
				return "", err
			}
			return found, checkHosts(filepath.Join(found, "hosts.toml"))
		}
		return "", fmt.Errorf("host %q: %w", host, errdefs.ErrNotFound)
	}
}

func checkHosts(path string) error {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var parsed map[string]any
	if err := toml.Unmarshal(data, &parsed); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Close ends the session's context and its connections.
func (s *Session) Close() {
	for _, f := range s.idle {
		f()
	}
}

// Resolve asks for the digest that the image's name stands for. The media type is a claim of
// the registry; so would be the size, which is left at 0. Errors as of [Classify].
func (s *Session) Resolve(ctx context.Context) (ocispec.Descriptor, error) {
	_, desc, err := s.resolver.Resolve(ctx, s.name.String())
	if size, over := rejectedSize(err); over {
		return ocispec.Descriptor{}, tooLarge(s.name.String(), size)
	}
	if err != nil {
		return ocispec.Descriptor{}, Failed(ctx, err)
	}
	if digested, ok := s.name.(reference.Digested); ok && desc.Digest != digested.Digest() {
		return ocispec.Descriptor{}, fmt.Errorf("image %q resolved to %s: %w", s.name, desc.Digest, errdefs.ErrDataLoss)
	}
	if desc.Size > maxDocument {
		return ocispec.Descriptor{}, tooLarge(s.name.String(), desc.Size)
	}
	desc.Size = 0
	return desc, nil
}

// rejectedSize finds the size of a manifest that was too large for the resolver, which tells it in
// words only, and as one that is not there.
func rejectedSize(err error) (size int64, over bool) {
	if !errdefs.IsNotFound(err) {
		return 0, false
	}
	_, text, found := strings.Cut(err.Error(), "rejecting ")
	if !found {
		return 0, false
	}
	n, err := fmt.Sscanf(text, "%d byte manifest", &size)
	return size, n == 1 && err == nil
}
