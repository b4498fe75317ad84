// Package shim starts, finds again, watches and ends the shims of pods: programs that speak
// the shim protocol of containerd (version 2) and own the processes of containers.
//
// There is one shim and one connection per pod. A shim outlives this process: its bundle
// holds all that is needed to connect anew, which Reload does for all pods side by side. A
// connection that breaks is tried again as long as the shim's process exists. When it does
// not, the shim is dead: whatever it left running is killed, its mounts are removed, and
// the exits that it saved, or that its clean-up found out, can be asked for until the pod
// is shut down. Events that shims send are not handled here, nor are the meanings of task
// calls.
package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cleanup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/sockets"
)

const bootIDFile = "/proc/sys/kernel/random/boot_id"

// Timeouts are the limits of single steps. A zero means the default.
type Timeouts struct {
	// Start bounds the shim's start command. Default 10 s.
	Start time.Duration
	// Connect bounds connecting to a started shim. Default 5 s.
	Connect time.Duration
	// Create bounds the creation of a container's process by the OCI runtime. Default 90 s: less
	// than what kubelet waits for an answer.
	Create time.Duration
	// Load bounds connecting to one shim after a restart. Default 5 s.
	Load time.Duration
	// Cleanup bounds each step of cleaning up after a dead shim. Default 5 s.
	Cleanup time.Duration
	// Shutdown bounds the wait for a shim that was told to end. Default 3 s.
	Shutdown time.Duration
}

// Config says where shims live and what they are told.
type Config struct {
	// Dir holds the bundles.
	Dir string
	// SocketDir is where shims that understand it put their sockets; at most 41 characters,
	// since the address of a socket is short. Empty leaves it to the shim.
	SocketDir string
	// EventsSocket is the path of the ttrpc event service. It must stay the same for the
	// life of every shim.
	EventsSocket string
	// Address is passed as the address of the gRPC service. Shims derive the name of their
	// socket from it. Empty means EventsSocket.
	Address string
	// Version is told to shims as the version of the runtime.
	Version string
	// Env is added to the environment of shims, which is PATH, the variables of
	// OpenTelemetry, those of the protocol and XDG_RUNTIME_DIR, and nothing else.
	Env []string
	// Debug makes shims log more.
	Debug bool
	// NoGroups says that containers have no control groups.
	NoGroups bool
	// Timeouts are the limits of single steps.
	Timeouts Timeouts
	// Client are options of the connections, such as interceptors for traces.
	Client []ttrpc.ClientOpts
	// Tracer makes the spans of starting; nil for none.
	Tracer trace.Tracer
}

// Manager holds the shims of all pods. It is safe for concurrent use.
type Manager struct {
	cfg      Config
	log      *slog.Logger
	bootID   string
	commands *command.Runner
	cleaner  *cleanup.Cleaner
	sockets  *sockets.Sweeper
	tracer   trace.Tracer

	base   context.Context //nolint:containedctx // the life of the watchers, which outlive each call
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// mu guards what follows.
	mu     sync.Mutex
	shims  map[string]*Instance
	closed bool
}

// New returns a manager and makes its folders. The values of ctx, not its end, are those of
// the watchers; they end with Close.
func New(ctx context.Context, cfg Config, log *slog.Logger) (*Manager, error) {
	if cfg.Dir == "" || cfg.EventsSocket == "" {
		return nil, fmt.Errorf("shim manager: folder and event socket are needed: %w", errdefs.ErrInvalidArgument)
	}
	if len(cfg.SocketDir) > sockets.MaxDir {
		return nil, fmt.Errorf("shim socket folder %q is longer than %d characters: %w",
			cfg.SocketDir, sockets.MaxDir, errdefs.ErrInvalidArgument)
	}
	if cfg.Address == "" {
		cfg.Address = cfg.EventsSocket
	}
	cfg.Timeouts = cfg.Timeouts.withDefaults()
	if err := os.MkdirAll(cfg.Dir, 0o711); err != nil {
		return nil, fmt.Errorf("shim manager: %w", err)
	}
	if cfg.SocketDir != "" {
		if err := os.MkdirAll(cfg.SocketDir, 0o700); err != nil {
			return nil, fmt.Errorf("shim manager: %w", err)
		}
	}
	commands, err := command.New(command.Config{
		SocketDir: cfg.SocketDir, EventsSocket: cfg.EventsSocket, Address: cfg.Address, Version: cfg.Version,
		Env: cfg.Env, Debug: cfg.Debug,
	})
	if err != nil {
		return nil, fmt.Errorf("shim manager: %w", err)
	}
	boot, err := os.ReadFile(bootIDFile)
	if err != nil {
		return nil, fmt.Errorf("shim manager: %w", err)
	}
	m := &Manager{
		cfg:      cfg,
		log:      log,
		bootID:   strings.TrimSpace(string(boot)),
		commands: commands,
		tracer:   cfg.Tracer,
		shims:    map[string]*Instance{},
	}
	m.cleaner = cleanup.New(commands, cfg.Timeouts.Cleanup, m.bootID)
	m.sockets = sockets.New(cfg.SocketDir, m.socketsInUse)
	if m.tracer == nil {
		m.tracer = noop.NewTracerProvider().Tracer("")
	}
	m.base, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return m, nil
}

func (t Timeouts) withDefaults() Timeouts {
	for field, value := range map[*time.Duration]time.Duration{
		&t.Start:    10 * time.Second,
		&t.Connect:  5 * time.Second,
		&t.Create:   90 * time.Second,
		&t.Load:     5 * time.Second,
		&t.Cleanup:  5 * time.Second,
		&t.Shutdown: 3 * time.Second,
	} {
		if *field <= 0 {
			*field = value
		}
	}
	return t
}

// Spec describes a shim that is to be started.
type Spec struct {
	// SandboxID is the id of the pod's sandbox.
	SandboxID string
	// Handler says which shim it is and with what options.
	Handler pod.Handler
	// Config is the config.json of the sandbox's bundle.
	Config []byte
}

// Create makes the bundle of a sandbox. It fails with ErrAlreadyExists if the sandbox is
// known, and with ErrFailedPrecondition if the handler's shim cannot be found.
func (m *Manager) Create(_ context.Context, spec Spec) (*Instance, error) {
	binary, err := command.Binary(spec.Handler)
	if err != nil {
		return nil, err
	}
	options, err := command.Options(spec.Handler)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	_, exists := m.shims[spec.SandboxID]
	closed := m.closed
	m.mu.Unlock()
	if exists {
		return nil, fmt.Errorf("sandbox %q: %w", spec.SandboxID, errdefs.ErrAlreadyExists)
	}
	if closed {
		return nil, fmt.Errorf("sandbox %q: %w", spec.SandboxID, errClosed)
	}
	meta := bundle.Meta{
		Sandboxer:   spec.Handler.Sandboxer,
		RuntimeType: spec.Handler.RuntimeType,
		ShimPath:    binary,
		BootID:      m.bootID,
	}
	b, err := bundle.Create(m.cfg.Dir, spec.SandboxID, spec.Config, meta)
	if err != nil {
		return nil, err
	}
	i := m.newInstance(b, meta)
	i.options = options
	m.mu.Lock()
	m.shims[spec.SandboxID] = i
	m.mu.Unlock()
	return i, nil
}

// errClosed says that the manager has been closed.
var errClosed = fmt.Errorf("shim manager is closed: %w", errdefs.ErrUnavailable)

// Get returns the shim of a sandbox. It fails with ErrNotFound if there is none.
func (m *Manager) Get(sandboxID string) (*Instance, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i, ok := m.shims[sandboxID]
	if !ok {
		return nil, fmt.Errorf("shim of sandbox %q: %w", sandboxID, errdefs.ErrNotFound)
	}
	return i, nil
}

// All returns the known shims, ordered by the id of their sandboxes.
func (m *Manager) All() []*Instance {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*Instance, 0, len(m.shims))
	for _, id := range slices.Sorted(maps.Keys(m.shims)) {
		all = append(all, m.shims[id])
	}
	return all
}

// Close ends all connections and waits for the watchers. No shim and no container is touched.
func (m *Manager) Close() error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.cancel()
	var errs []error
	for _, i := range m.All() {
		errs = append(errs, i.release())
	}
	m.wg.Wait()
	return errors.Join(errs...)
}

// CreateLimit is how long the creation of a container's process may take.
func (m *Manager) CreateLimit() time.Duration { return m.cfg.Timeouts.Create }

// Features asks a handler's shim what its OCI runtime can do; no shim stays. It fails with
// ErrFailedPrecondition if the shim or its runtime is not there.
func (m *Manager) Features(ctx context.Context, h pod.Handler) (command.Features, error) {
	return m.commands.Features(ctx, h, m.cfg.Timeouts.Start)
}

// socketsInUse are the sockets of the shims that are not dead.
func (m *Manager) socketsInUse() map[string]bool {
	used := map[string]bool{}
	for _, i := range m.All() {
		i.mu.Lock()
		used[i.endpoint.SocketPath()] = i.state != stateDead
		i.mu.Unlock()
	}
	return used
}

// sweepSoon removes the socket that a start may have left which was killed before it told
// its address.
func (m *Manager) sweepSoon() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed {
		m.wg.Go(func() { m.sockets.Soon(m.base) })
	}
}
