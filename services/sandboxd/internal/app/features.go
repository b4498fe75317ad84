package app

import (
	"context"
	"log/slog"
	"sync"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// probeFeatures asks the shims of all handlers what they can do, side by side. A feature
// needs the runtime, the kernel and the file system of the handler's snapshotter; a handler whose shim does not tell has none.
func (a *App) probeFeatures(ctx context.Context, cfg config.Config) map[string]*criv1.RuntimeHandlerFeatures {
	var mu sync.Mutex // guards out
	out := map[string]*criv1.RuntimeHandlerFeatures{}
	var wg sync.WaitGroup
	for name, h := range handlers(cfg).ByName {
		wg.Go(func() {
			f := a.handlerFeatures(ctx, h)
			f.UserNamespaces = f.GetUserNamespaces() && a.rootfs.MapsIDs(h.Snapshotter)
			mu.Lock()
			defer mu.Unlock()
			out[name] = f
		})
	}
	wg.Wait()
	return out
}

func (a *App) handlerFeatures(ctx context.Context, h pod.Handler) *criv1.RuntimeHandlerFeatures {
	f, err := a.shims.Features(ctx, h)
	if err != nil {
		a.tel.Log.WarnContext(ctx, "features of a runtime handler are not known", slog.String("handler", h.Name), slog.Any("error", err))
	}
	return &criv1.RuntimeHandlerFeatures{
		RecursiveReadOnlyMounts: f.RecursiveReadOnly && a.host.RecursiveReadOnly,
		UserNamespaces:          f.UserNamespaces,
	}
}
