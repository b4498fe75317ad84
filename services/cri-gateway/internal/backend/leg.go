package backend

import (
	"context"
	"slices"
	"strings"

	nri "github.com/containerd/nri/pkg/api"

	nriv1 "github.com/crisp-cri/crisp/proto/gen/crisp/nri/v1"
)

// leg is one hub's part of a request over several hubs, in the context of its calls.
// After a call it holds what the plugins have made of the request.
type leg struct {
	after, last string
	merge       *nriv1.Merge
}

type legKey struct{}

func withLeg(ctx context.Context, l *leg) context.Context {
	return context.WithValue(ctx, legKey{}, l)
}

// legOf is what a request is sent with; nil if it is whole.
func legOf(ctx context.Context) *nriv1.Leg {
	l, ok := ctx.Value(legKey{}).(*leg)
	if !ok {
		return nil
	}
	return &nriv1.Leg{After: l.after, Last: l.last, Merge: l.merge}
}

// passed keeps what a hub has made of its part.
func passed(ctx context.Context, m *nriv1.Merge) {
	if l, ok := ctx.Value(legKey{}).(*leg); ok && m != nil {
		l.merge = m
	}
}

// part is a row of neighbouring plugins that one hub has. The parts of a hub leave no gap
// between their names.
type part struct {
	hub         *Hub
	after, last string
}

func (p part) has(name string) bool { return name > p.after && (p.last == "" || name <= p.last) }

// divide puts the plugins of all hubs that listen to one of the events in the order of
// their names, and cuts that into one part for each row of plugins of one hub. Hubs
// without such plugins follow, because they may need to know of the request.
func divide(hubs []*Hub, events []nri.Event) []part {
	type plugin struct {
		hub  *Hub
		name string
	}
	var plugins []plugin
	for _, h := range hubs {
		st, _ := h.state.get()
		for _, p := range st.plugins {
			if listensToOne(p, events) {
				plugins = append(plugins, plugin{h, p.GetName()})
			}
		}
	}
	slices.SortStableFunc(plugins, func(a, b plugin) int { return strings.Compare(a.name, b.name) })
	var parts []part
	latest := make(map[*Hub]int) // index of a hub's latest part
	for _, p := range plugins {
		before, again := latest[p.hub]
		if again && before == len(parts)-1 {
			parts[before].last = p.name
			continue
		}
		next := part{hub: p.hub, last: p.name}
		if again {
			next.after = parts[before].last
		}
		latest[p.hub] = len(parts)
		parts = append(parts, next)
	}
	for _, h := range hubs {
		if i, there := latest[h]; there {
			parts[i].last = "" // whoever joins meanwhile
		} else {
			parts = append(parts, part{hub: h})
		}
	}
	return parts
}

func listensToOne(p *nriv1.PluginRef, events []nri.Event) bool {
	mask := nri.EventMask(p.GetEvents())
	return slices.ContainsFunc(events, mask.IsSet)
}
