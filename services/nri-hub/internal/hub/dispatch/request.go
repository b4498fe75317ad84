package dispatch

import (
	"context"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/vet"
)

// Request is one request of the gateway on its way along the plugins.
type Request struct {
	Event     nri.Event
	Pod       *nri.PodSandbox
	Container *nri.Container
	// Message is what the next plugin is sent.
	Message func() proto.Message
	// Take is given each plugin's answer; nil if answers mean nothing.
	Take func(plugin plug.ID, resp proto.Message) error
	// Tolerant requests go on when a plugin answers with an error, which is logged.
	Tolerant bool
	// Vetoable requests are worth waiting for a plugin that is joining.
	Vetoable bool
	// Implied is an event that a plugin may be told of first; 0 for none.
	Implied nri.Event
	// Claim is asked before each plugin is called; nil stands for "call".
	Claim func(ctx context.Context, m *member.Member) bool
	// Dry is not nil for a rehearsal: nothing is remembered of the request, and nothing but
	// the answers comes of it.
	Dry *Rehearsal
	// Prepare gets the taking of an answer ready while the plugin works on it; it may be nil.
	Prepare func()

	// required are the plugins that must answer.
	required []string
	// deadline is when the caller stops waiting; zero if that is not known.
	deadline time.Time
	// chores are notes for the ledger that are still to be written.
	chores []func()
}

// meanwhile does what can be done while a plugin works.
func (r *Request) meanwhile() {
	r.write()
	if r.Prepare != nil {
		r.Prepare()
	}
}

// write does the chores.
func (r *Request) write() {
	for _, chore := range r.chores {
		chore()
	}
	r.chores = nil
}

type deadlineKey struct{}

// WithDeadline says in a request's context until when its caller waits. That divides the
// time among the plugins; the request itself goes on after it.
func WithDeadline(ctx context.Context, deadline time.Time) context.Context {
	return context.WithValue(ctx, deadlineKey{}, deadline)
}

// left is the time that the caller has left, if that is known.
func (r *Request) left(ctx context.Context) (time.Duration, bool) {
	end := r.deadline
	if d, ok := ctx.Deadline(); ok && (end.IsZero() || d.Before(end)) {
		end = d
	}
	if end.IsZero() {
		return 0, false
	}
	return max(time.Until(end), 0), true
}

// minShare is what a plugin gets of a caller's time at least. The request goes on after
// its caller, so a healthy plugin is not to be passed by for a caller in a hurry.
const minShare = 250 * time.Millisecond

// share is what one of n plugins gets of the caller's time; zero means that it does not
// matter. A tenth is left for what comes after the plugins.
func (r *Request) share(ctx context.Context, n int) time.Duration {
	left, ok := r.left(ctx)
	if !ok || n < 1 {
		return 0
	}
	return max(left*9/10/time.Duration(n), minShare)
}

// concerns reports whether the plugin's rule chooses the pod.
func (r *Request) concerns(m *member.Member) bool { return m.Rule.Pods.Match(r.Pod) }

// hears reports whether the plugin gets the event: it has subscribed to it, and the pod is
// one of those that its rule chooses or that cannot do without it.
func (r *Request) hears(m *member.Member, e nri.Event) bool {
	return m.ListensTo(e) && (r.concerns(m) || r.needs(m))
}

// begins is the id of the object that plugins know of from this request on; empty for all
// other requests, and for rehearsals.
func (r *Request) begins() string {
	switch {
	case r.Dry != nil:
		return ""
	case r.Event == nri.Event_RUN_POD_SANDBOX:
		return r.Pod.GetId()
	case r.Event == nri.Event_CREATE_CONTAINER:
		return r.Container.GetId()
	default:
		return ""
	}
}

// endsOrBegins reports whether the event is kept even for a plugin that does not listen
// to it, because it says which objects the plugin knows.
func endsOrBegins(e nri.Event) bool {
	switch e {
	case nri.Event_RUN_POD_SANDBOX, nri.Event_CREATE_CONTAINER,
		nri.Event_STOP_POD_SANDBOX, nri.Event_REMOVE_POD_SANDBOX,
		nri.Event_STOP_CONTAINER, nri.Event_REMOVE_CONTAINER:
		return true
	default:
		return false
	}
}

// Rehearsal collects what happens in a dry run. It is used by one goroutine at a time.
type Rehearsal struct {
	Records []vet.Record
	Asked   []*member.Member
}
