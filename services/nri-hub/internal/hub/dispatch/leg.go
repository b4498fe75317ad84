package dispatch

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/adjust"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/member"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

// Leg is this hub's part of a request whose plugins are spread over several hubs. What
// comes of the part is put into it. Required plugins and validators are not asked for
// before Conclude.
type Leg struct {
	// After and Last are full names: the plugins of the part stand behind the one and up to
	// the other. An empty one is no limit.
	After, Last string
	// State is what the plugins have made of the request, before the call those of the
	// parts before.
	State     adjust.State
	Consulted []*nri.PluginInstance
}

type legKey struct{}

// WithLeg makes a request a part of one over several hubs; nil leaves it whole.
func WithLeg(ctx context.Context, l *Leg) context.Context {
	if l == nil {
		return ctx
	}
	return context.WithValue(ctx, legKey{}, l)
}

// LegOf is nil for a request that is whole.
func LegOf(ctx context.Context) *Leg {
	l, _ := ctx.Value(legKey{}).(*Leg)
	return l
}

// within leaves of the plugins, which are in the order of calls, those of the part.
func (l *Leg) within(members []*member.Member) []*member.Member {
	if l == nil {
		return members
	}
	return slices.DeleteFunc(slices.Clone(members), func(m *member.Member) bool {
		name := m.Info.ID.String()
		return name <= l.After || l.Last != "" && name > l.Last
	})
}

// Conclude checks what the plugins of several hubs have made of a request: those that this
// hub requires have taken part, and its validators agree. container is nil for a request
// about a pod, which has no validators.
func (d *Dispatcher) Conclude(ctx context.Context, pod *nri.PodSandbox, container *nri.Container, all Leg) error {
	names, err := d.parts.Roster.Policy().Required.For(pod, container.GetName())
	if err != nil {
		return fmt.Errorf("pod %s/%s: %w: %w", pod.GetNamespace(), pod.GetName(), err, errdefs.ErrInvalidArgument)
	}
	if err := tookPart(names, all.Consulted); err != nil {
		return err
	}
	if container == nil {
		return nil
	}
	req := &nri.CreateContainerRequest{Pod: pod, Container: container}
	r := &Request{Event: nri.Event_CREATE_CONTAINER, Pod: pod, Container: container}
	return d.Validate(ctx, r, adjust.ResumeCreate(req, all.State).Validation(all.Consulted))
}

// tookPart returns an error that names a plugin which is missing among the consulted.
func tookPart(names []string, consulted []*nri.PluginInstance) error {
	for _, name := range names {
		there := slices.ContainsFunc(consulted, func(p *nri.PluginInstance) bool {
			return plug.ID{Index: p.GetIndex(), Name: p.GetName()}.Matches(name)
		})
		if !there {
			return absent(name)
		}
	}
	return nil
}
