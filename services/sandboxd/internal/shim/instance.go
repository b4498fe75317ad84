package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/link"
)

// state is where a shim is in its life.
type state int

const (
	stateCreated state = iota // has a bundle only
	stateRunning              // answers
	stateLost                 // lives, but there is no connection
	stateDead                 // has ended and was cleaned up after
	stateGone                 // was shut down
)

// Instance is the shim of one pod. It is safe for concurrent use.
type Instance struct {
	m       *Manager
	bundle  bundle.Pod
	meta    bundle.Meta
	options *anypb.Any
	log     *slog.Logger
	// busy is held by Start and shutdown, one at a time.
	busy chan struct{}
	// ended is closed when the state is dead or gone.
	ended chan struct{}

	// mu guards everything below.
	mu       sync.Mutex
	state    state
	closing  bool // the end of the connection is intended
	endpoint link.Endpoint
	conn     *link.Conn
	shimPid  uint32
	logPipe  *os.File
	exits    map[string]pod.Exit // of containers that were cleaned up after a dead shim
	struck   map[string]bool     // containers whose first process KillAll has sent SIGKILL
	killed   map[string]pod.Exit // of containers that KillAll ended
	// whenKilled are the functions of WhenKilled, by container.
	whenKilled map[string]map[*byte]func()
	diedAt     time.Time
	removals   map[string]chan struct{} // of containers that are being removed; closed at its end
	changed    chan struct{}            // closed and replaced at each change of the state
	abort      context.CancelFunc       // ends a Start
}

func (m *Manager) newInstance(b bundle.Pod, meta bundle.Meta) *Instance {
	return &Instance{
		m:      m,
		bundle: b,
		meta:   meta,
		log:    m.log.With(slog.String("sandbox_id", b.ID())),
		busy:   make(chan struct{}, 1),
		ended:  make(chan struct{}),
		exits:  map[string]pod.Exit{},
		struck: map[string]bool{},
		killed: map[string]pod.Exit{},

		whenKilled: map[string]map[*byte]func(){},
		removals:   map[string]chan struct{}{},
		changed:    make(chan struct{}),
	}
}

// ID is the id of the sandbox.
func (i *Instance) ID() string { return i.bundle.ID() }

// Meta is what is durably known of the shim.
func (i *Instance) Meta() bundle.Meta { return i.meta }

// Bundle is the pod's folder.
func (i *Instance) Bundle() bundle.Pod { return i.bundle }

// Status is a snapshot of a shim.
type Status struct {
	// Alive says that there is a connection.
	Alive bool
	// Ended says that the shim is dead and was cleaned up after, or was shut down.
	Ended bool
	// Pid is the shim's process id, as it told; 0 if it did not.
	Pid uint32
	// Endpoint is where it listens.
	Endpoint link.Endpoint
	// DiedAt is when a dead shim was found dead.
	DiedAt time.Time
}

// Status returns a snapshot of the shim without asking it.
func (i *Instance) Status() Status {
	i.mu.Lock()
	defer i.mu.Unlock()
	return Status{
		Alive:    i.state == stateRunning,
		Ended:    i.state == stateDead || i.state == stateGone,
		Pid:      i.shimPid,
		Endpoint: i.endpoint,
		DiedAt:   i.diedAt,
	}
}

// Ended is closed when the shim is dead and was cleaned up after, or was shut down.
func (i *Instance) Ended() <-chan struct{} { return i.ended }

// Exit returns the exit of a container that was found out without its shim: by KillAll, or by
// the clean-up after the shim's death.
func (i *Instance) Exit(containerID string) (pod.Exit, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	// What KillAll found out may have been told already, so it stays.
	if e, ok := i.killed[containerID]; ok {
		return e, true
	}
	e, ok := i.exits[containerID]
	return e, ok
}

// Killed returns the exit of a container that KillAll ended.
func (i *Instance) Killed(containerID string) (pod.Exit, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	e, ok := i.killed[containerID]
	return e, ok
}

// WhenKilled calls fn once KillAll has ended a container, at once if it has; forget takes that
// back. fn must neither block nor use the instance.
func (i *Instance) WhenKilled(containerID string, fn func()) (forget func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if _, ok := i.killed[containerID]; ok {
		fn()
		return func() {}
	}
	key := new(byte) // one of its own for each call
	if i.whenKilled[containerID] == nil {
		i.whenKilled[containerID] = map[*byte]func(){}
	}
	i.whenKilled[containerID][key] = fn
	return func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		delete(i.whenKilled[containerID], key)
		if len(i.whenKilled[containerID]) == 0 {
			delete(i.whenKilled, containerID)
		}
	}
}

// noteStruck notes whether the first process of a container is about to be killed, and says
// whether it was at any time: a later look does not find it any more.
func (i *Instance) noteStruck(containerID string, now bool) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if now {
		i.struck[containerID] = true
	}
	return i.struck[containerID]
}

// noteKilled keeps the exit of a container that KillAll ended and calls who asked for it.
// The first one stays.
func (i *Instance) noteKilled(containerID string, e pod.Exit) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if _, ok := i.killed[containerID]; ok {
		return
	}
	i.killed[containerID] = e
	for _, fn := range i.whenKilled[containerID] {
		fn()
	}
	delete(i.whenKilled, containerID)
}

// isClean says whether what a dead shim left of a container was cleaned up.
func (i *Instance) isClean(containerID string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	_, ok := i.exits[containerID]
	return ok
}

// Settle waits while it is not clear whether the shim is alive: until there is a connection,
// or until the shim is dead and was cleaned up after.
func (i *Instance) Settle(ctx context.Context) error {
	for {
		i.mu.Lock()
		conn, s, changed := i.conn, i.state, i.changed
		i.mu.Unlock()
		switch s {
		case stateDead, stateGone:
			return nil
		case stateRunning:
			select {
			case <-conn.Closed():
				// The watcher has not seen it yet.
			default:
				return nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Task calls a method of the shim's task service. It fails with ErrUnavailable while there
// is no connection.
func (i *Instance) Task(ctx context.Context, method string, req, resp proto.Message) error {
	conn, version, err := i.connection()
	if err != nil {
		return err
	}
	return conn.Task(ctx, version, method, req, resp)
}

// Sandbox calls a method of the shim's sandbox service. It fails with ErrUnavailable while
// there is no connection.
func (i *Instance) Sandbox(ctx context.Context, method string, req, resp proto.Message) error {
	conn, _, err := i.connection()
	if err != nil {
		return err
	}
	return conn.Sandbox(ctx, method, req, resp)
}

// Options are the runtime options of the shim's handler; after a restart, nil.
func (i *Instance) Options() *anypb.Any { return i.options }

func (i *Instance) connection() (*link.Conn, int, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.state != stateRunning {
		return nil, 0, fmt.Errorf("shim of sandbox %q is not connected: %w", i.ID(), errdefs.ErrUnavailable)
	}
	return i.conn, i.endpoint.Version, nil
}

// Start starts the shim of a created sandbox and connects to it. Whatever of it fails, the
// shim's processes, its socket and the bundle are gone afterwards and the sandbox is unknown.
func (i *Instance) Start(ctx context.Context) (err error) {
	ctx, span := i.m.tracer.Start(ctx, "sandboxd.shim.start")
	defer span.End()
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)

	i.mu.Lock()
	i.abort = func() { abort(fmt.Errorf("sandbox %q is being shut down: %w", i.ID(), errdefs.ErrAborted)) }
	i.mu.Unlock()
	if err := i.acquire(ctx); err != nil {
		return err
	}
	defer i.free()

	i.mu.Lock()
	s := i.state
	i.mu.Unlock()
	if s != stateCreated {
		return fmt.Errorf("shim of sandbox %q was started before: %w", i.ID(), errdefs.ErrFailedPrecondition)
	}
	if err := i.launch(ctx); err != nil {
		err = errors.Join(fmt.Errorf("sandbox %q: %w", i.ID(), err), i.discard(ctx))
		if i.Status().Endpoint.Address == "" {
			i.m.sweepSoon()
		}
		return err
	}
	i.m.watch(i)
	return nil
}

// launch runs the start command and connects.
func (i *Instance) launch(ctx context.Context) error {
	if err := i.openLog(); err != nil {
		return err
	}
	passing, err := i.m.sockets.Passing(i.ID())
	if err != nil {
		return fmt.Errorf("folder of shim %q: %w", i.meta.ShimPath, err)
	}
	shim := command.Shim{Path: i.meta.ShimPath, ID: i.ID(), Dir: i.bundle.Dir(), Passing: passing}
	e, err := i.m.commands.Start(ctx, shim, i.options, i.m.cfg.Timeouts.Start)
	if err != nil {
		return err
	}
	i.mu.Lock()
	i.endpoint = e
	i.mu.Unlock()
	if err := command.SaveEndpoint(i.bundle.Dir(), e); err != nil {
		return fmt.Errorf("shim %q: %w", i.meta.ShimPath, err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, i.m.cfg.Timeouts.Connect,
		fmt.Errorf("no connection within %s: %w", i.m.cfg.Timeouts.Connect, errdefs.ErrUnavailable))
	defer cancel()
	for {
		err := i.connect(ctx)
		if err == nil || !errors.Is(err, errNoListener) {
			return err
		}
		// Some shims answer a little before they listen.
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(listenPoll):
		}
	}
}

// listenPoll is the pause between two tries to connect to a shim that is not listening yet.
const listenPoll = 10 * time.Millisecond

// errNoListener says that nobody listens at a shim's address.
var errNoListener = errors.New("nobody listens")

// connect dials the shim's endpoint, makes sure that the shim answers, and uses the
// connection from now on.
func (i *Instance) connect(ctx context.Context) error {
	i.mu.Lock()
	e := i.endpoint
	i.mu.Unlock()
	conn, err := link.Dial(ctx, e, i.m.cfg.Client...)
	if err != nil {
		if errdefs.IsUnavailable(err) {
			return fmt.Errorf("%w: %w", errNoListener, err)
		}
		return err
	}
	version, pid, err := hello(ctx, conn, i.ID(), e.Version)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return errors.Join(fmt.Errorf("shim address %q: %w", e.Address, err), conn.Close())
	}
	i.mu.Lock()
	i.endpoint.Version = version
	i.conn, i.shimPid = conn, pid
	i.mu.Unlock()
	i.set(stateRunning)
	return nil
}

// hello asks a shim for its process id and finds out which version of the task service it
// really has: some say 3 and serve 2.
func hello(ctx context.Context, conn *link.Conn, id string, version int) (int, uint32, error) {
	var resp taskapi.ConnectResponse
	err := conn.Task(ctx, version, "Connect", &taskapi.ConnectRequest{ID: id}, &resp)
	if errdefs.IsNotImplemented(err) && version == 3 {
		version = 2
		err = conn.Task(ctx, version, "Connect", &taskapi.ConnectRequest{ID: id}, &resp)
	}
	if errdefs.IsNotFound(err) {
		// Old shims look for a container of that id; the answer shows that they live.
		err = nil
	}
	return version, resp.GetShimPid(), err
}

// set changes the state and tells everybody who waits.
func (i *Instance) set(s state) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.state == stateGone || (i.state == stateDead && s != stateGone) {
		return
	}
	wasEnded := i.state == stateDead
	i.state = s
	if s == stateDead && i.diedAt.IsZero() {
		i.diedAt = time.Now()
	}
	if (s == stateDead || s == stateGone) && !wasEnded {
		close(i.ended)
	}
	close(i.changed)
	i.changed = make(chan struct{})
}

func (i *Instance) acquire(ctx context.Context) error {
	select {
	case i.busy <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (i *Instance) free() { <-i.busy }

// openLog opens the shim's log and copies it in the background until release.
func (i *Instance) openLog() error {
	f, err := openLog(i.bundle.Dir())
	if err != nil {
		return err
	}
	i.mu.Lock()
	i.logPipe = f
	i.mu.Unlock()
	i.m.wg.Go(func() { copyLog(i.m.base, i.log, f) })
	return nil
}

// release closes the connection and the log without touching the shim.
func (i *Instance) release() error {
	i.mu.Lock()
	i.closing = true
	conn, pipe := i.conn, i.logPipe
	i.logPipe = nil
	i.mu.Unlock()
	var errs []error
	if conn != nil {
		errs = append(errs, conn.Close())
	}
	if pipe != nil {
		errs = append(errs, pipe.Close())
	}
	return errors.Join(errs...)
}
