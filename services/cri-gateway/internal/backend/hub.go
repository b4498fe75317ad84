package backend

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
	"github.com/crisp-cri/crisp/services/cri-gateway/internal/backend/limited"
	"github.com/crisp-cri/crisp/services/internal/podselector"
	"github.com/crisp-cri/crisp/services/internal/rpc"
)

// HubConfig says how the gateway lives with its hub.
type HubConfig struct {
	// Hold is how long calls are held back for a hub that is away or not ready,
	// counted from the moment it went away.
	Hold time.Duration
	// Require makes calls fail while the hub is away; otherwise they go on without it.
	Require bool
	// RuntimeName and RuntimeVersion are what plugins are told.
	RuntimeName, RuntimeVersion string
}

// HubObserver is told how calls fare. Its method is called concurrently.
type HubObserver interface {
	// Held is called when a call has been held back for the hub.
	Held(d time.Duration)
}

// Hub is the client of nri-hub. Calls that no plugin listens to return at once, without
// a round trip. While the hub is away, or its plugins are not back, calls are held back
// until it has been away for the hold time; after that they follow the policy at once.
type Hub struct {
	client   nriv1.HubServiceClient
	cfg      HubConfig
	policy   atomic.Pointer[policy]
	observer HubObserver
	log      *slog.Logger
	state    watched[hubState]
	passing  passing
}

// policy is what of the configuration may change while the hub is used.
type policy struct {
	hold    time.Duration
	require bool
}

type hubState struct {
	// connected is set with the first state that the hub announces on a stream.
	connected  bool
	ready      bool
	generation uint64
	events     nri.EventMask
	// guards and annotations say which pods require plugins; they are kept while the hub is
	// away.
	guards             []*nriv1.Guard
	ignoresAnnotations bool
	degraded, missing  []string
	// plugins are the hub's, kept while it is away.
	plugins []*nriv1.PluginRef
	// epoch counts the streams, so that two states of one generation differ.
	epoch uint64
	// awaySince is when the hub was last connected and ready, or the start.
	awaySince time.Time
}

func (s hubState) usable() bool { return s.connected && s.ready }

func (s hubState) listens(events []nri.Event) bool {
	return slices.ContainsFunc(events, s.events.IsSet)
}

// concerned reports whether the hub is to be called: somebody listens, or the pod itself
// requires plugins.
func (s hubState) concerned(pod *nri.PodSandbox, events []nri.Event) bool {
	return s.listens(events) || s.annotated(pod)
}

// annotated reports whether the pod names plugins that it requires. What exactly it says
// is the hub's business.
func (s hubState) annotated(pod *nri.PodSandbox) bool {
	if s.ignoresAnnotations {
		return false
	}
	for key := range pod.GetAnnotations() {
		if key == requiredPlugins || strings.HasPrefix(key, requiredPlugins+"/") {
			return true
		}
	}
	return false
}

// guardsPod reports whether the pod must not be made without the hub.
func (s hubState) guardsPod(pod *nri.PodSandbox) bool {
	if pod == nil {
		return false
	}
	guarded := s.annotated(pod)
	for _, g := range s.guards {
		selector := podselector.Selector{
			Namespaces: g.GetNamespaces(), NotNamespaces: g.GetNotNamespaces(), Labels: g.GetLabels(), Annotations: g.GetAnnotations(),
		}
		if !selector.Match(pod) {
			continue
		}
		if g.GetExempt() {
			return false
		}
		guarded = true
	}
	return guarded
}

// requiredPlugins is NRI's annotation with which a pod requires plugins.
const requiredPlugins = "required-plugins.noderesource.dev"

// Plugins names the plugins that do not answer, and those that are required and away.
func (h *Hub) Plugins() (degraded, missing []string) {
	st, _ := h.state.get()
	return st.degraded, st.missing
}

// NewHub returns a client on conn. It has no state before Run has connected.
func NewHub(conn *grpc.ClientConn, cfg HubConfig, observer HubObserver, log *slog.Logger) *Hub {
	// How long calls wait for the hub is decided here by its state, not by the connection.
	client := nriv1.NewHubServiceClient(limited.New(conn, rpc.Lane(conn), 0))
	h := &Hub{client: client, cfg: cfg, observer: observer, log: log}
	h.state.init(hubState{awaySince: time.Now()})
	h.SetPolicy(cfg.Hold, cfg.Require)
	return h
}

// SetPolicy changes how long calls are held back and whether they fail then; calls that wait
// already keep the time they began with.
func (h *Hub) SetPolicy(hold time.Duration, require bool) {
	h.policy.Store(&policy{hold: hold, require: require})
}

// Required says whether calls fail while the hub is away.
func (h *Hub) Required() bool { return h.policy.Load().require }

// Ready returns nil if the hub is connected and its plugins are back.
func (h *Hub) Ready(context.Context) error {
	switch st, _ := h.state.get(); {
	case !st.connected:
		return fmt.Errorf("not connected to nri-hub: %w", errdefs.ErrUnavailable)
	case !st.ready:
		return fmt.Errorf("nri-hub waits for its plugins: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// statusTime bounds the question for the hub's status.
const statusTime = time.Second

// Status returns what the hub says of itself and its plugins. It does not wait for a hub
// that is away. Errors: Unavailable.
func (h *Hub) Status(ctx context.Context) (*nriv1.GetStatusResponse, error) {
	if st, _ := h.state.get(); !st.connected {
		return nil, fmt.Errorf("not connected to nri-hub: %w", errdefs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, statusTime)
	defer cancel()
	return h.client.GetStatus(ctx, &nriv1.GetStatusRequest{})
}

// await returns the state of a hub that can be called; ok is false if there is none.
func (h *Hub) await(ctx context.Context) (st hubState, ok bool, err error) {
	start, hold := time.Now(), h.policy.Load().hold
	held := false
	defer func() {
		if held {
			h.observer.Held(time.Since(start))
		}
	}()
	for {
		st, changed := h.state.get()
		if st.usable() {
			return st, true, nil
		}
		left := hold - time.Since(st.awaySince)
		if left <= 0 {
			// Plugins that are there get their events, whoever is missing.
			return st, st.connected && !h.Required(), nil
		}
		held = true
		if err := waitChange(ctx, changed, left); err != nil {
			return st, false, err
		}
	}
}

// awaitAfter waits, at most the hold time, for a hub other than the one of state old.
func (h *Hub) awaitAfter(ctx context.Context, old hubState) (st hubState, ok bool, err error) {
	start, hold := time.Now(), h.policy.Load().hold
	defer func() { h.observer.Held(time.Since(start)) }()
	for {
		st, changed := h.state.get()
		if st.usable() && (st.generation != old.generation || st.epoch != old.epoch) {
			return st, true, nil
		}
		left := hold - time.Since(start)
		if left <= 0 {
			return st, false, nil
		}
		if err := waitChange(ctx, changed, left); err != nil {
			return st, false, err
		}
	}
}

// away is the answer of the policy when there is no hub to call. A pod that requires
// plugins, as far as the hub has said, is not made without them; pod is nil for requests
// that need no plugin.
func (h *Hub) away(pod *nri.PodSandbox) error {
	st, _ := h.state.get()
	switch {
	case h.Required():
		return fmt.Errorf("nri-hub is away: %w", errdefs.ErrUnavailable)
	case st.guardsPod(pod):
		return fmt.Errorf("nri-hub is away and pod %s/%s requires plugins: %w",
			pod.GetNamespace(), pod.GetName(), errdefs.ErrUnavailable)
	default:
		return nil
	}
}

// call performs do for a hub that listens to one of the events, with its generation. A
// hub that has changed meanwhile is waited for and called once more. pod is the one that
// is made or gets a container, nil for all other requests.
func (h *Hub) call(ctx context.Context, pod *nri.PodSandbox, do func(ctx context.Context, generation uint64) error, events ...nri.Event) error {
	st, ok, err := h.await(ctx)
	if err != nil {
		return err
	}
	if !ok || !st.concerned(pod, events) {
		h.goBy(ctx)
		// Whoever joined before this operation was noted did not wait for it.
		if st, _ = h.state.get(); !st.usable() || !st.concerned(pod, events) {
			if !ok {
				return h.away(pod)
			}
			return nil
		}
	}
	failure := do(ctx, st.generation)
	if !errdefs.IsUnavailable(failure) {
		return failure
	}
	next, ok, err := h.awaitAfter(ctx, st)
	switch {
	case err != nil:
		return err
	case !ok && next.connected && next.epoch == st.epoch:
		// The same hub is still there, so this is its answer and not its absence.
		return failure
	case !ok:
		return h.away(pod)
	case !next.concerned(pod, events):
		return nil
	}
	return do(ctx, next.generation)
}

// Wants implements sequence.Hub.
func (h *Hub) Wants(ctx context.Context, events ...nri.Event) (bool, error) {
	st, ok, err := h.await(ctx)
	if err != nil {
		return false, err
	}
	if !ok {
		return false, h.away(nil)
	}
	return st.listens(events), nil
}
