package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/bundle"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
)

// Loaded is what Reload found of one sandbox.
type Loaded struct {
	// SandboxID is the id of the sandbox.
	SandboxID string
	// Alive says that the shim answers. If it is false and Err is nil, the shim lives but
	// did not answer in time; the connection comes by itself when it does.
	Alive bool
	// Err says why a shim is dead. What it left was cleaned up; the exits of its containers
	// can be asked for.
	Err error
	// Containers are those that have a bundle.
	Containers []string
}

// Known tells which handler a sandbox was made with, and in which boot of the machine, from
// elsewhere than its bundle; false for a sandbox that is not known.
type Known func(sandboxID string) (h pod.Handler, bootID string, ok bool)

// Reload connects to the shims of all bundles, side by side, each within its own limit, and
// cleans up after those that are dead. What a bundle has lost is taken from known, which may be
// nil. It is called once, before anything else.
func (m *Manager) Reload(ctx context.Context, known Known) ([]Loaded, error) {
	if err := bundle.Sweep(m.cfg.Dir); err != nil {
		m.log.WarnContext(ctx, "rests of bundles", slog.String("error", err.Error()))
	}
	ids, err := bundle.List(m.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("shim bundles: %w", err)
	}
	loaded := make([]Loaded, len(ids))
	var wg sync.WaitGroup
	for n, id := range ids {
		wg.Go(func() { loaded[n] = m.load(ctx, id, known) })
	}
	wg.Wait()
	m.sockets.Sweep(ctx)
	// A start that outlived the last sandboxd ends by itself, but may leave its socket after that.
	m.wg.Go(func() { m.sockets.After(m.base, m.cfg.Timeouts.Start) })
	return loaded, nil
}

// load brings one sandbox back.
func (m *Manager) load(ctx context.Context, id string, known Known) Loaded {
	out := Loaded{SandboxID: id}
	b, err := bundle.Open(m.cfg.Dir, id)
	if err != nil {
		out.Err = err
		return out
	}
	out.Containers, _ = b.Containers()
	meta, metaErr := b.Meta()
	if metaErr != nil {
		meta, metaErr = m.restoreMeta(ctx, b, known, metaErr)
	}
	i := m.newInstance(b, meta)
	m.mu.Lock()
	m.shims[id] = i
	m.mu.Unlock()

	e, bootErr := command.LoadEndpoint(b.Dir())
	i.mu.Lock()
	i.endpoint = e
	i.mu.Unlock()
	switch {
	case metaErr != nil:
		err = metaErr
	case meta.BootID != m.bootID:
		err = fmt.Errorf("the machine was restarted: %w", errdefs.ErrNotFound)
	case bootErr != nil:
		err = bootErr
	default:
		err = i.resume(ctx)
	}
	if err == nil {
		out.Alive = i.Status().Alive
		m.watch(i)
		return out
	}
	i.log.WarnContext(ctx, "shim not found again", slog.String("error", err.Error()))
	out.Err = err
	kctx, cancel := context.WithTimeout(ctx, m.cfg.Timeouts.Cleanup)
	defer cancel()
	if err := procs.KillIn(kctx, b.Dir()); err != nil {
		out.Err = errors.Join(out.Err, err)
	}
	i.bury(ctx)
	return out
}

// restoreMeta finds out anew what a bundle does not tell any more. It returns the error that it
// was given if that is not all of it; the metadata are then just enough to clean up by.
func (m *Manager) restoreMeta(ctx context.Context, b bundle.Pod, known Known, lost error) (bundle.Meta, error) {
	// Who works in the bundle is the shim.
	program := procs.ProgramIn(b.Dir())
	meta := bundle.Meta{ShimPath: program}
	if program != "" {
		meta.BootID = m.bootID
	}
	if known == nil {
		return meta, lost
	}
	h, bootID, ok := known(b.ID())
	if !ok {
		return meta, lost
	}
	path, err := command.Binary(h)
	if err != nil {
		return meta, errors.Join(lost, err)
	}
	if program != "" && !sameFile(program, path) {
		return meta, lost // the handler has another shim by now
	}
	meta = bundle.Meta{Sandboxer: h.Sandboxer, RuntimeType: h.RuntimeType, ShimPath: path, BootID: bootID}
	if err := b.SaveMeta(meta); err != nil {
		return meta, errors.Join(lost, err)
	}
	m.log.WarnContext(ctx, "description of a sandbox bundle restored from its record",
		slog.String("sandbox_id", b.ID()), slog.String("error", lost.Error()))
	return meta, nil
}

// sameFile says whether two paths lead to the same file.
func sameFile(a, b string) bool {
	sa, errA := os.Stat(a)
	sb, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(sa, sb)
}

// resume connects to a shim that an earlier process started. It returns nil for a shim
// whose process exists but does not answer.
func (i *Instance) resume(ctx context.Context) error {
	if err := i.openLog(); err != nil {
		i.log.WarnContext(ctx, "shim log", slog.String("error", err.Error()))
	}
	err := i.tryConnect(ctx)
	if err == nil || errors.Is(err, errNoListener) || len(procs.In(i.bundle.Dir())) == 0 {
		return err
	}
	i.log.WarnContext(ctx, "shim does not answer", slog.String("error", err.Error()))
	i.set(stateLost)
	return nil
}
