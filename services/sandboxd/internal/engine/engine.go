package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"go.opentelemetry.io/otel/trace"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

// Ports are the outside things that the engine works with. All must be set.
type Ports struct {
	Store  *store.Store
	Images Images
	Rootfs Rootfs
	// ImageVolumes mounts images as volumes.
	ImageVolumes ImageVolumes
	Network      Network
	Namespaces   Namespaces
	Files        Files
	Controller   Controller
	Tasks        Tasks
	IO           IO
	Specs        Specs
	Programs     Programs
	Cgroups      Cgroups
}

// Config are the engine's values.
type Config struct {
	// Handlers by name; DefaultHandler names the one for an empty request.
	Handlers       map[string]pod.Handler
	DefaultHandler string
	// BootID of the running kernel; records of another one are of before a reboot.
	BootID string
	// SessionGrace is how long a lost gateway session may take to come back before what it
	// prepared is aborted.
	SessionGrace time.Duration
	// ContainerDir is the folder under which a container's volumes live.
	ContainerDir string
}

// Engine is the heart of sandboxd. Its methods are safe for concurrent use.
type Engine struct {
	cfg    Config
	p      Ports
	log    *slog.Logger
	tracer trace.Tracer

	recovered chan struct{}   // closed when Recover is done
	life      context.Context //nolint:containedctx // background work lives as long as the engine
	end       context.CancelCauseFunc
	work      sync.WaitGroup // background work: waits, network releases, session graces

	// closing guards the entry into work: nothing is added once Close has begun.
	closing sync.RWMutex
	closed  bool

	sessions sessions

	// mu guards the indexes, not what they point at.
	mu         sync.RWMutex
	sandboxes  map[string]*sandbox
	containers map[string]*container
	names      map[string]string // sandbox and container keys → id
	releases   map[string]*recordv1.NetworkRelease
}

// sandbox is one sandbox in memory.
type sandbox struct {
	id         string
	turn       slot // operations
	writing    slot // changes of the record
	rec        atomic.Pointer[recordv1.Sandbox]
	handler    pod.Handler
	files      pod.SandboxFiles
	namespaces map[string]string
	session    string      // token of the session that prepares it
	doomed     atomic.Bool // its undoing failed and is repeated in the background
}

// container is one container in memory.
type container struct {
	id      string
	sandbox *sandbox
	turn    slot // operations
	writing slot // changes of the record
	rec     atomic.Pointer[recordv1.Container]
	session string
	pending atomic.Pointer[specs.Spec] // the specification until it is committed
	// takeBack undoes what the specification changed on the node; nil once committed.
	// Only who has the turn touches it.
	takeBack func()
	started  chan struct{} // closed when the outcome of the start is recorded
	exited   chan struct{} // closed when the record says EXITED
	oom      atomic.Bool   // the shim hinted at an OOM kill
	// deleting is closed when the task of the ended container is deleted; nil before the end.
	deleting atomic.Pointer[chan struct{}]

	signalled atomic.Bool // the stop signal was sent
	killed    atomic.Bool // SIGKILL was sent
	doomed    atomic.Bool // its undoing failed and is repeated in the background
}

// New returns an engine without objects. Call Recover before anything else.
func New(ctx context.Context, cfg Config, p Ports, log *slog.Logger, tracer trace.Tracer) *Engine {
	life, end := context.WithCancelCause(context.WithoutCancel(ctx))
	return &Engine{
		cfg: cfg, p: p, log: log, tracer: tracer,
		recovered: make(chan struct{}), life: life, end: end,
		sessions:   newSessions(),
		sandboxes:  map[string]*sandbox{},
		containers: map[string]*container{},
		names:      map[string]string{},
		releases:   map[string]*recordv1.NetworkRelease{},
	}
}

// Close ends the background work and waits for it. Containers are not touched.
func (e *Engine) Close() {
	e.closing.Lock()
	e.closed = true
	e.closing.Unlock()
	e.end(fmt.Errorf("sandboxd stops: %w", errdefs.ErrUnavailable))
	e.work.Wait()
}

// Recovered reports whether the state is complete.
func (e *Engine) Recovered() bool {
	select {
	case <-e.recovered:
		return true
	default:
		return false
	}
}

// RecoveredC is closed once the state is complete.
func (e *Engine) RecoveredC() <-chan struct{} { return e.recovered }

// ready fails while the state is incomplete, so that no answer comes from half of it.
func (e *Engine) ready() error {
	if !e.Recovered() {
		return fmt.Errorf("sandboxd is still recovering its state: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// background runs fn until it is done or the engine is closed; a closed engine does not
// begin with it.
func (e *Engine) background(fn func(ctx context.Context)) {
	e.closing.RLock()
	defer e.closing.RUnlock()
	if !e.closed {
		e.work.Go(func() { fn(e.life) })
	}
}

func newID() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}

// handler finds a runtime handler by name.
func (e *Engine) handler(name string) (pod.Handler, error) {
	if name == "" {
		name = e.cfg.DefaultHandler
	}
	h, ok := e.cfg.Handlers[name]
	if !ok {
		known := make([]string, 0, len(e.cfg.Handlers))
		for n := range e.cfg.Handlers {
			known = append(known, n)
		}
		sort.Strings(known)
		return pod.Handler{}, fmt.Errorf("runtime_handler %q is not configured, known are %s: %w",
			name, strings.Join(known, ", "), errdefs.ErrNotFound)
	}
	return h, nil
}

// sandbox finds a sandbox by its full id.
func (e *Engine) sandbox(id string) (*sandbox, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	s, ok := e.sandboxes[id]
	if !ok {
		return nil, fmt.Errorf("sandbox %q: %w", id, errdefs.ErrNotFound)
	}
	return s, nil
}

// container finds a container by its full id.
func (e *Engine) container(id string) (*container, error) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	c, ok := e.containers[id]
	if !ok {
		return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
	}
	return c, nil
}

// SandboxID completes an unambiguous prefix to a sandbox id. While the state is incomplete
// it fails with ErrUnavailable: what is not known then may exist.
func (e *Engine) SandboxID(prefix string) (string, error) {
	err := e.ready()
	if err != nil {
		return "", err
	}
	e.mu.RLock()
	defer e.mu.RUnlock()
	return completeID("sandbox", prefix, e.sandboxes)
}

// ContainerID completes an unambiguous prefix to a container id, as SandboxID does.
func (e *Engine) ContainerID(prefix string) (string, error) {
	err := e.ready()
	if err != nil {
		return "", err
	}
	e.mu.RLock()
	defer e.mu.RUnlock()
	return completeID("container", prefix, e.containers)
}

func completeID[T any](kind, prefix string, m map[string]T) (string, error) {
	if _, ok := m[prefix]; ok {
		return prefix, nil
	}
	if prefix == "" {
		return "", fmt.Errorf("%s id must not be empty: %w", kind, errdefs.ErrInvalidArgument)
	}
	found := ""
	for id := range m {
		if !strings.HasPrefix(id, prefix) {
			continue
		}
		if found != "" {
			return "", fmt.Errorf("%s id prefix %q is ambiguous: %w", kind, prefix, errdefs.ErrInvalidArgument)
		}
		found = id
	}
	if found == "" {
		return "", fmt.Errorf("%s %q: %w", kind, prefix, errdefs.ErrNotFound)
	}
	return found, nil
}

// containersOf returns the containers of a sandbox, oldest first.
func (e *Engine) containersOf(sandboxID string) []*container {
	e.mu.RLock()
	defer e.mu.RUnlock()
	var out []*container
	for _, c := range e.containers {
		if c.sandbox != nil && c.sandbox.id == sandboxID {
			out = append(out, c)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].id < out[j].id })
	return out
}

// reserve takes a name for an id. It returns the present holder if there is one.
func (e *Engine) reserve(key, id string) (holder string, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if holder, taken := e.names[key]; taken {
		return holder, false
	}
	e.names[key] = id
	return id, true
}

// forget drops an object and its name.
func (e *Engine) forgetSandbox(s *sandbox, key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.sandboxes, s.id)
	if e.names[key] == s.id {
		delete(e.names, key)
	}
}

func (e *Engine) forgetContainer(c *container, key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.containers, c.id)
	if e.names[key] == c.id {
		delete(e.names, key)
	}
}
