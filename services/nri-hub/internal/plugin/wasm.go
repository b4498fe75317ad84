package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
	"github.com/tetratelabs/wazero/sys"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Modules loads WebAssembly plugins. What was compiled is kept in a folder, so that a
// module is compiled once. It is safe for concurrent use.
type Modules struct {
	log   *slog.Logger
	cache wazero.CompilationCache
}

// NewModules makes a loader; an empty folder keeps nothing. Neither does one that cannot be
// used, which is no reason to do without plugins and only logged.
func NewModules(folder string, log *slog.Logger) *Modules {
	if folder != "" {
		cache, err := wazero.NewCompilationCacheWithDir(folder)
		if err == nil {
			return &Modules{log: log, cache: cache}
		}
		log.Warn("wasm plugins are compiled at each start: their folder cannot be used",
			slog.String("folder", folder), slog.Any("error", err))
	}
	return &Modules{log: log, cache: wazero.NewCompilationCache()}
}

// Close gives the memory of compiled modules back. Call it when no plugin runs any more.
func (m *Modules) Close(ctx context.Context) error { return m.cache.Close(ctx) }

// load compiles the module if needed, which can take seconds, and starts it.
func (m *Modules) load(ctx context.Context, path string, id plug.ID) (module, error) {
	runtime := func(ctx context.Context) (wazero.Runtime, error) {
		// A call that exceeds its time ends the module: it could not be stopped otherwise.
		cfg := wazero.NewRuntimeConfig().WithCloseOnContextDone(true).WithCompilationCache(m.cache)
		r := wazero.NewRuntimeWithConfig(ctx, cfg)
		if _, err := wasi_snapshot_preview1.Instantiate(ctx, r); err != nil {
			return nil, errors.Join(err, r.Close(ctx))
		}
		return r, nil
	}
	loader, err := nri.NewPluginPlugin(ctx, nri.WazeroRuntime(runtime))
	if err != nil {
		return nil, err
	}
	return loader.Load(ctx, path, hostFunctions{m.log.With(slog.String("plugin", id.String()))})
}

// module is a loaded WebAssembly plugin.
type module interface {
	nri.Plugin
	Close(ctx context.Context) error
}

// hostFunctions are what a module can call.
type hostFunctions struct{ log *slog.Logger }

// Log implements NRI's host functions.
func (h hostFunctions) Log(ctx context.Context, req *nri.LogRequest) (*nri.Empty, error) {
	level := slog.LevelInfo
	switch req.GetLevel() {
	case nri.LogRequest_LEVEL_DEBUG:
		level = slog.LevelDebug
	case nri.LogRequest_LEVEL_WARN:
		level = slog.LevelWarn
	case nri.LogRequest_LEVEL_ERROR:
		level = slog.LevelError
	default:
	}
	h.log.Log(ctx, level, "plugin output", slog.String("line", req.GetMsg()))
	return &nri.Empty{}, nil
}

var _ plug.Plugin = (*wasm)(nil)

// wasm is a plugin that runs inside the hub. A module takes one call at a time, whatever
// its rule says.
type wasm struct {
	srv    *Server
	module module
	info   plug.Info
	end    func() error  // closes the module
	turn   chan struct{} // of capacity one
	done   chan struct{}
	ended  sync.Once
}

// ServeWasm loads the module at path and keeps it until it fails or ctx ends. The error
// says why it never became active.
func (s *Server) ServeWasm(ctx context.Context, path string, l Launched) error {
	info := plug.Info{ID: l.ID, Kind: plug.Wasm, Executable: path, NRIVersion: s.cfg.NRIVersion}
	if s.refuses() {
		return fmt.Errorf("hub is stopping: %w", context.Canceled)
	}
	if err := s.parts.Host.Admit(info); err != nil {
		return err
	}
	// Loading must not be cut short by a deadline that the module would keep.
	base := context.WithoutCancel(ctx)
	mod, err := s.parts.Modules.load(base, path, l.ID)
	if err != nil {
		return fmt.Errorf("load wasm plugin %q: %w", l.ID, err)
	}
	w := &wasm{srv: s, module: mod, info: info, turn: make(chan struct{}, 1), done: make(chan struct{})}
	w.end = func() error { return mod.Close(base) }
	defer w.Close(plug.ErrLost)
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.RequestTimeout)
	defer cancel()
	var resp *nri.ConfigureResponse
	err = w.call(cctx, "Configure", func(ctx context.Context) (err error) {
		resp, err = mod.Configure(ctx, s.configureRequest(l.ID, l.Config))
		return err
	})
	if err != nil {
		return fmt.Errorf("configure plugin %q: %w", l.ID, err)
	}
	w.info.Events, w.info.Policy = s.subscription(ctx, l.ID, resp)
	return s.parts.Host.Serve(ctx, w)
}

// Info is complete after configuration.
func (w *wasm) Info() plug.Info { return w.info }

// Done is closed when the module is.
func (w *wasm) Done() <-chan struct{} { return w.done }

// Close ends the module.
func (w *wasm) Close(cause error) {
	w.ended.Do(func() {
		close(w.done)
		w.srv.parts.Log.Info("wasm plugin ended", slog.String("plugin", w.info.ID.String()), slog.Any("cause", cause))
		if err := w.end(); err != nil {
			w.srv.parts.Log.Debug("wasm plugin did not end cleanly", slog.Any("error", err))
		}
	})
}

// Shutdown tells the plugin that it will be ended.
func (w *wasm) Shutdown(ctx context.Context) error {
	return w.call(ctx, "Shutdown", func(ctx context.Context) error {
		_, err := w.module.Shutdown(ctx, &nri.Empty{})
		return err
	})
}

// Synchronize sends one part of the inventory.
func (w *wasm) Synchronize(ctx context.Context, req *nri.SynchronizeRequest) (resp *nri.SynchronizeResponse, err error) {
	err = w.call(ctx, "Synchronize", func(ctx context.Context) (err error) {
		resp, err = w.module.Synchronize(ctx, req)
		return err
	})
	return resp, err
}

// Call sends the request that belongs to event.
func (w *wasm) Call(ctx context.Context, event nri.Event, req proto.Message) (resp proto.Message, err error) {
	err = w.call(ctx, event.PrettyName(), func(ctx context.Context) (err error) {
		resp, err = invoke(ctx, w.module, event, req)
		return err
	})
	return resp, err
}

// call makes one call within the deadline of ctx, whose end may come later.
func (w *wasm) call(ctx context.Context, operation string, do func(context.Context) error) error {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	return w.srv.observe(ctx, w.info.ID, operation, w.sort, func(ctx context.Context) error {
		select {
		case w.turn <- struct{}{}:
		case <-w.done:
			return plug.ErrLost
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		defer func() { <-w.turn }()
		return do(ctx)
	})
}

// sort tells a plugin's own answer from the end of the module, after which it cannot be
// called any more.
func (w *wasm) sort(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, plug.ErrLost) {
		return err
	}
	var exit *sys.ExitError
	if !errors.As(err, &exit) && !strings.Contains(err.Error(), "wasm stack trace") {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	w.Close(err)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", plug.ErrLost, err)
}

// errNoMethod is the answer of a plugin without a method for the event.
func errNoMethod(event nri.Event, req proto.Message) error {
	return status.Error(grpccodes.Internal, fmt.Sprintf("no method for %s with a %T", event.PrettyName(), req))
}
