package app

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/pause"
	"github.com/crisp-cri/crisp/services/internal/unixsock"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/launch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// pluginsPart serves plugins that connect and runs those that are pre-installed. At the
// stop it says goodbye to all of them before anything is closed.
func (a *App) pluginsPart() lifecycle.Part {
	goodbye := a.cfg.Timeouts.Request.Std()
	return lifecycle.Part{
		Name:        "plugins",
		StopTimeout: 2*goodbye + a.cfg.Launch.StopTimeout.Std() + 5*time.Second,
		Run: func(ctx context.Context, ready func()) error {
			// Plugins are cut off only after they were told; hence a context that does not
			// end with ctx.
			inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
			defer cancel()
			g, inner := errgroup.WithContext(inner)
			if err := a.listen(inner, g); err != nil {
				cancel()
				return err
			}
			if a.cfg.Launch.Enable {
				g.Go(func() error { return a.launcher().Run(inner) })
			}
			ready()
			select {
			case <-ctx.Done():
			case <-inner.Done():
			}
			a.plugins.Refuse()
			farewell, done := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
			a.hub.Shutdown(farewell)
			done()
			cancel()
			return g.Wait()
		},
	}
}

func (a *App) listen(ctx context.Context, g *errgroup.Group) error {
	if !a.cfg.NRI.Enable {
		return nil
	}
	l, err := unixsock.Listen(ctx, a.cfg.NRI.Socket)
	if err != nil {
		return fmt.Errorf("socket for plugins: %w", err)
	}
	g.Go(func() error {
		a.keepListening(ctx, g, l)
		return nil
	})
	return nil
}

// keepListening serves the socket, and makes it again when its file is gone: a hub that nobody
// can reach would look well. Connections stay.
func (a *App) keepListening(ctx context.Context, g *errgroup.Group, l net.Listener) {
	log := a.tel.Log.With(slog.String("path", a.cfg.NRI.Socket.Path))
	for {
		g.Go(func() error { return a.plugins.Serve(ctx, l) })
		if !unixsock.Lost(ctx, l) {
			return
		}
		log.WarnContext(ctx, "socket for plugins is gone or was replaced; it is made again")
		if err := l.Close(); err != nil {
			log.DebugContext(ctx, "plugin socket did not close cleanly", slog.Any("error", err))
		}
		for failed := false; ; failed = true {
			var err error
			if l, err = unixsock.Listen(ctx, a.cfg.NRI.Socket); err == nil {
				break
			}
			if !failed {
				log.ErrorContext(ctx, "no plugin can connect until the socket can be made", slog.Any("error", err))
			}
			if !pause.For(ctx, time.Second) {
				return
			}
		}
		log.InfoContext(ctx, "plugins can connect again")
	}
}

func (a *App) launcher() *launch.Launcher {
	cfg := a.cfg.Launch
	return launch.New(launch.Config{
		Folder:       cfg.Folder,
		ConfigFolder: cfg.ConfigFolder,
		MinBackoff:   cfg.MinBackoff.Std(),
		MaxBackoff:   cfg.MaxBackoff.Std(),
		StopTimeout:  cfg.StopTimeout.Std(),
		Extra:        a.extra,
	}, a.tel.Log, launched{a.plugins})
}

// extra is how one launched plugin is run besides; the first entry that matches counts.
func (a *App) extra(index, name string) launch.Extra {
	for _, p := range a.cfg.Plugins {
		if len(rule.Plugins{{Name: p.Name}}.For(index, name).Name) > 0 {
			return launch.Extra{Env: p.Launch.Env, Rlimits: p.Launch.Rlimits}
		}
	}
	return launch.Extra{}
}

// logAdapter sends what NRI's packages log to our log, where it is detail.
type logAdapter struct{ log *slog.Logger }

// Debugf implements NRI's logger.
func (l logAdapter) Debugf(ctx context.Context, format string, args ...any) {
	l.print(ctx, slog.LevelDebug, format, args)
}

// Infof implements NRI's logger.
func (l logAdapter) Infof(ctx context.Context, format string, args ...any) {
	l.print(ctx, slog.LevelDebug, format, args)
}

// Warnf implements NRI's logger.
func (l logAdapter) Warnf(ctx context.Context, format string, args ...any) {
	l.print(ctx, slog.LevelWarn, format, args)
}

// Errorf implements NRI's logger. Its errors are answers to requests, which are logged
// there.
func (l logAdapter) Errorf(ctx context.Context, format string, args ...any) {
	l.print(ctx, slog.LevelInfo, format, args)
}

func (l logAdapter) print(ctx context.Context, level slog.Level, format string, args []any) {
	l.log.Log(ctx, level, "nri library", slog.String("text", fmt.Sprintf(format, args...)))
}
