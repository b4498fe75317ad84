// Package task drives the processes of containers by an OCI runtime.
//
// The events of a container come in the order Create, Start, Exit, Delete; those of its execs
// lie in between, and the lack of memory that ended a process comes before its end. The end
// of a first process is saved in the bundle before anybody learns of it. When the first
// process ends, all others of the container end too, whatever process namespace they are in.
// A container whose creation fails leaves nothing. Deleting can be repeated after an error.
//
// All types are safe for concurrent use. The package knows no wire format.
package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containerd/console"
	"github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/stdio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

const (
	// cleanTime bounds the removal of what a failed creation left.
	cleanTime = 10 * time.Second
	// killTime bounds the wait for the processes of a group to end after SIGKILL.
	killTime = 5 * time.Second
	// maxID is the longest id.
	maxID = 76
)

// Host is what all containers of a shim share.
type Host struct {
	Namespace string
	Reaper    *reaper.Reaper
	// Publish sends an event. It does not block.
	Publish func(topic string, event proto.Message)
	Log     *slog.Logger
}

// Spec describes a container to create.
type Spec struct {
	ID, Bundle            string
	Rootfs                []*types.Mount
	Terminal              bool
	Stdin, Stdout, Stderr string
	Options               *options.Options
	// Checkpoint is the folder of a checkpoint that the first process is restored from when
	// it is started; empty for none. ParentCheckpoint is the one that it is based on.
	Checkpoint, ParentCheckpoint string
}

// Container is a container and its processes.
type Container struct {
	host    Host
	spec    Spec
	runtime Runtime
	runc    *runc.Runc
	ownPids bool
	init    *Process

	// mu guards the rest.
	mu     sync.Mutex
	execs  map[string]*Process
	over   bool // the first process has ended
	paused bool
	group  cgroup.Group
	watch  *cgroup.OOMWatch
	oom    uint64 // kills for lack of memory that were published
}

// Create creates a container and its first process, which does not run yet.
func Create(ctx context.Context, host Host, spec Spec) (*Container, error) {
	if err := checkID(spec.ID); err != nil {
		return nil, err
	}
	if !filepath.IsAbs(spec.Bundle) {
		return nil, fmt.Errorf("bundle %q is not absolute: %w", spec.Bundle, errdefs.ErrInvalidArgument)
	}
	cfg, err := readConfig(spec.Bundle)
	if err != nil {
		return nil, err
	}
	r := runtimeOf(spec.Options, host.Namespace)
	c := &Container{
		host: host, spec: spec, runtime: r, runc: r.Client(spec.Bundle), ownPids: cfg.ownPids(), execs: map[string]*Process{},
	}
	c.init = newProcess(c, "", stdio.Config{
		Terminal: spec.Terminal, Stdin: spec.Stdin, Stdout: spec.Stdout, Stderr: spec.Stderr,
	})
	if err := c.init.acquire(ctx); err != nil {
		return nil, err
	}
	defer c.init.release()
	if err := c.create(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("container %q: %w", spec.ID, err), c.abandon(ctx))
	}
	host.Publish("/tasks/create", &events.TaskCreate{
		ContainerID: spec.ID, Checkpoint: spec.Checkpoint, Bundle: spec.Bundle, Rootfs: spec.Rootfs, Pid: uint32(c.init.Pid()),
		IO: &events.TaskIO{Stdin: spec.Stdin, Stdout: spec.Stdout, Stderr: spec.Stderr, Terminal: spec.Terminal},
	})
	return c, nil
}

// checkID checks that an id can be the name of a file.
func checkID(id string) error {
	ok := id != "" && len(id) <= maxID && id[0] != '.' && id[0] != '-'
	for _, r := range id {
		ok = ok && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r == '.')
	}
	if !ok {
		return fmt.Errorf("id %.100q: %w", id, errdefs.ErrInvalidArgument)
	}
	return nil
}

func (c *Container) rootfs() string { return filepath.Join(c.spec.Bundle, "rootfs") }

// create mounts the root file system and lets the runtime create the process.
func (c *Container) create(ctx context.Context) error {
	if err := c.runtime.save(c.spec.Bundle); err != nil {
		return err
	}
	if err := c.mount(); err != nil {
		return err
	}
	if c.spec.Checkpoint != "" {
		return c.checkCheckpoint() // the process comes with its start
	}
	hold := c.host.Reaper.Hold()
	defer hold.Release()
	o := c.spec.Options
	pidFile := filepath.Join(c.spec.Bundle, initPidFile)
	err := c.init.connect(ctx, func(socket runc.ConsoleSocket, io runc.IO) error {
		opts := &runc.CreateOpts{PidFile: pidFile, NoPivot: o.GetNoPivotRoot(), NoNewKeyring: o.GetNoNewKeyring(), IO: io}
		if socket != nil {
			opts.ConsoleSocket = socket
		}
		since := sizeOf(c.runc.Log)
		return runtimeError(c.runc.Create(ctx, c.spec.ID, c.spec.Bundle, opts), "create", c.runc.Log, since)
	})
	if err != nil {
		return err
	}
	return c.adopt(ctx, hold)
}

// adopt follows the first process, which the runtime has made.
func (c *Container) adopt(ctx context.Context, hold *reaper.Hold) error {
	pid, err := readPid(filepath.Join(c.spec.Bundle, initPidFile))
	if err != nil {
		return err
	}
	group, err := cgroup.Of(pid)
	if err != nil {
		// It may have ended already.
		c.host.Log.WarnContext(ctx, "control group of a container is not known", slog.String("container_id", c.spec.ID), slog.String("error", err.Error()))
	}
	c.mu.Lock()
	c.group = group
	c.mu.Unlock()
	c.watchOOM()
	c.init.claim(hold, pid)
	return nil
}

func (c *Container) mount() error {
	if len(c.spec.Rootfs) == 0 {
		return nil
	}
	if err := os.Mkdir(c.rootfs(), 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	mounts := make([]mount.Mount, len(c.spec.Rootfs))
	for i, m := range c.spec.Rootfs {
		mounts[i] = mount.Mount{Type: m.GetType(), Source: m.GetSource(), Target: m.GetTarget(), Options: m.GetOptions()}
	}
	if err := mount.All(mounts, c.rootfs()); err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	return nil
}

// unmount detaches the root file system, which returns at once where a plain unmount would
// wait for the disk.
func (c *Container) unmount() error {
	if len(c.spec.Rootfs) == 0 {
		return nil
	}
	if err := mount.UnmountRecursive(c.rootfs(), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	return nil
}

// abandon removes what a failed creation left.
func (c *Container) abandon(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
	defer cancel()
	if err := c.runtime.Delete(ctx, c.spec.Bundle, c.spec.ID); err != nil {
		c.host.Log.DebugContext(ctx, "rest of a failed creation", slog.String("container_id", c.spec.ID), slog.String("error", err.Error()))
	}
	c.unwatchOOM()
	return errors.Join(c.init.disconnect(), c.unmount())
}

// watchOOM begins to tell of processes that the kernel kills for lack of memory.
func (c *Container) watchOOM() {
	c.mu.Lock()
	defer c.mu.Unlock()
	w, err := c.group.WatchOOM(func(uint64) { c.publishOOM() })
	if err != nil {
		// The end of the first process looks once more.
		c.host.Log.Debug("lack of memory is not watched", slog.String("container_id", c.spec.ID), slog.String("error", err.Error()))
		return
	}
	c.watch = w
}

func (c *Container) unwatchOOM() {
	c.mu.Lock()
	w := c.watch
	c.watch = nil
	c.mu.Unlock()
	if w != nil {
		w.Close()
	}
}

// publishOOM tells of a lack of memory that was not told yet.
func (c *Container) publishOOM() {
	c.mu.Lock()
	defer c.mu.Unlock()
	kills := c.group.OOMKills()
	if kills <= c.oom {
		return
	}
	c.oom = kills
	c.host.Publish("/tasks/oom", &events.TaskOOM{ContainerID: c.spec.ID})
}

// ID is the container's id.
func (c *Container) ID() string { return c.spec.ID }

// Bundle is the container's folder.
func (c *Container) Bundle() string { return c.spec.Bundle }

// Group is the container's control group.
func (c *Container) Group() cgroup.Group {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.group
}

// Processes are processes that belong together.
type Processes interface {
	// Pids lists them.
	Pids() ([]int, error)
	// Signal sends a signal to each once.
	Signal(sig unix.Signal) error
	// Kill kills them until none is left. It fails with ErrUnavailable if some outlive ctx.
	Kill(ctx context.Context) error
}

// Processes are those of the container: of its control group, or, if it has none, those with its
// root file system.
func (c *Container) Processes() Processes {
	if group := c.Group(); !group.None() {
		return group
	}
	return procs.Rooted(c.rootfs())
}

// Process returns the first process, for an empty id, or an exec. It fails with ErrNotFound
// if there is none of that id.
func (c *Container) Process(execID string) (*Process, error) {
	if execID == "" {
		return c.init, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p, ok := c.execs[execID]
	if !ok {
		return nil, fmt.Errorf("exec %q of container %q: %w", execID, c.spec.ID, errdefs.ErrNotFound)
	}
	return p, nil
}

// Execs lists the execs.
func (c *Container) Execs() []*Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]*Process, 0, len(c.execs))
	for _, p := range c.execs {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b *Process) int { return a.Pid() - b.Pid() })
	return out
}

// attachConsole receives the terminal that the runtime sends.
func attachConsole(socket *runc.Socket) (console.Console, error) {
	c, err := socket.ReceiveMaster()
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	return c, nil
}
