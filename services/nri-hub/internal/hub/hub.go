package hub

import (
	"context"
	"log/slog"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/call"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/dispatch"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/join"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/outward"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/roster"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/rule"
)

// Config are the hub's rules.
type Config struct {
	Call     call.Config
	Dispatch dispatch.Config

	Generation    uint64          // of this start of the hub
	SettleTimeout time.Duration   // how long the hub is not ready for lack of expected plugins
	OrphanGrace   time.Duration   // after which what a lost gateway has left unfinished is ended
	UpdateTimeout time.Duration   // for an update that a plugin asks the gateway for
	Policy        roster.Policy   // the rules at the start
	Runtime       outward.Runtime // as plugins are told before a gateway has come
	Expected      []plug.ID       // plugins that were active before the hub started
	Past          object.Past     // what plugins had been told before the hub started
}

// Parts are what the hub works with.
type Parts struct {
	Log    *slog.Logger
	Sync   join.Synchronizer
	Memory roster.Memory
	// Ledger remembers what plugins were told; nil if nothing does.
	Ledger object.Ledger
	// Active is told the number of active plugins, and of degraded ones, when it may have
	// changed.
	Active func(active, degraded int)
	// Audit takes the records of what plugins change; it must not block. Nil drops them.
	Audit func(ctx context.Context, r vet.Record)
	// TimedOut is told of a call that was not answered in time; it may be nil.
	TimedOut func(plugin plug.ID, e nri.Event)
}

// Hub is the whole. Use New.
type Hub struct {
	cfg Config
	log *slog.Logger

	roster     *roster.Roster
	objects    *object.Table
	outward    *outward.Link
	caller     *call.Caller
	dispatcher *dispatch.Dispatcher
	joiner     *join.Joiner
}

// New makes a hub without plugins and without gateway.
func New(cfg Config, parts Parts) *Hub {
	log := parts.Log
	h := &Hub{cfg: cfg, log: log, objects: object.NewTable(cfg.Past, parts.Ledger)}
	h.roster = roster.New(roster.Config{
		Generation: cfg.Generation, SettleTimeout: cfg.SettleTimeout, Expected: cfg.Expected,
		Known: cfg.Past.KnownBy(), Policy: cfg.Policy,
	}, roster.Parts{Log: log, Memory: parts.Memory, Active: parts.Active})
	checker := &vet.Checker{Log: log, Objects: h.objects, Audit: parts.Audit}
	h.outward = outward.New(outward.Parts{
		Log: log, Roster: h.roster, Vet: checker, Timeout: cfg.UpdateTimeout, Runtime: cfg.Runtime,
	})
	h.caller = call.New(cfg.Call, call.Parts{Log: log, Roster: h.roster, Outward: h.outward, TimedOut: parts.TimedOut})
	h.dispatcher = dispatch.New(cfg.Dispatch, dispatch.Parts{
		Log: log, Roster: h.roster, Objects: h.objects, Vet: checker, Caller: h.caller,
	})
	h.joiner = join.New(join.Parts{
		Log: log, Roster: h.roster, Objects: h.objects, Outward: h.outward, Caller: h.caller,
		Sync: parts.Sync, Ledger: parts.Ledger,
	})
	return h
}

// Generation is the number of this start of the hub.
func (h *Hub) Generation() uint64 { return h.cfg.Generation }

// SetPolicy changes the rules for requests and plugins to come; see roster.SetPolicy.
func (h *Hub) SetPolicy(p roster.Policy) { h.roster.SetPolicy(p) }

// Required says which pods require plugins.
func (h *Hub) Required() rule.Required { return h.roster.Policy().Required }

// State returns what the gateway is to be told, and a channel that is closed when that
// changes.
func (h *Hub) State() (roster.State, <-chan struct{}) { return h.roster.State() }

// Plugins lists all plugins in the order of calls.
func (h *Hub) Plugins() []member.Status {
	members := h.roster.Members()
	list := make([]member.Status, 0, len(members))
	for _, m := range members {
		list = append(list, m.Status())
	}
	return list
}

// Admit returns why a plugin is not welcome; see roster.Admit.
func (h *Hub) Admit(info plug.Info) error { return h.roster.Admit(info) }

// Serve keeps a configured plugin in the hub until it is disconnected or ctx ends; see
// join.Serve.
func (h *Hub) Serve(ctx context.Context, p plug.Plugin) error { return h.joiner.Serve(ctx, p) }

// RequestTimeout is the time that a plugin has for one call, where its rule does not say
// otherwise for single requests.
func (h *Hub) RequestTimeout(plugin plug.ID) time.Duration {
	if d := h.roster.Rule(plugin).Timeout; d > 0 {
		return d
	}
	return h.cfg.Call.RequestTimeout
}

// Runtime is the name and the version of the runtime as plugins are told.
func (h *Hub) Runtime() (name, version string) {
	r := h.outward.Runtime()
	return r.Name, r.Version
}

// Attach makes gw the gateway that plugins are synchronised from; see outward.Attach.
func (h *Hub) Attach(gw outward.Gateway, runtime outward.Runtime) (detach func()) {
	return h.outward.Attach(gw, runtime)
}

// Update passes on what a plugin wants of its own accord; see outward.Update.
func (h *Hub) Update(ctx context.Context, plugin plug.ID, updates []*nri.ContainerUpdate, evictions []*nri.ContainerEviction) ([]*nri.ContainerUpdate, error) {
	return h.outward.Update(ctx, plugin, updates, evictions)
}

// Requires names the plugins that must take part in the making of a pod, or of one of its
// containers; see dispatch.Requires.
func (h *Hub) Requires(pod *nri.PodSandbox, container string) ([]string, time.Duration, error) {
	return h.dispatcher.Requires(pod, container)
}

// Conclude checks what the plugins of several hubs have made of a request; see
// dispatch.Conclude.
func (h *Hub) Conclude(ctx context.Context, pod *nri.PodSandbox, container *nri.Container, all dispatch.Leg) error {
	return h.dispatcher.Conclude(ctx, pod, container, all)
}

// Shutdown tells all plugins that the hub ends and disconnects them. It returns when
// all have been told or the context has ended. Plugins that come later are refused.
func (h *Hub) Shutdown(ctx context.Context) {
	var wg sync.WaitGroup
	for _, m := range h.roster.Stop() {
		wg.Go(func() { h.caller.Dismiss(ctx, m, plug.ErrStopping) })
	}
	wg.Wait()
	h.caller.Wait()
}
