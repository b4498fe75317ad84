package member

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/object"
	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

func TestQueueIsInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var q Queue
		first, second, third := q.Enter(), q.Enter(), q.Enter()
		if err := first.Wait(t.Context(), nil, nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := third.Wait(ctx, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("third had its turn too early: %v", err)
		}
		second.Leave() // gives up while waiting
		first.Leave()
		if err := third.Wait(t.Context(), nil, nil); err != nil {
			t.Error(err)
		}
		third.Leave()
		third.Leave() // harmless
		gone := make(chan struct{})
		close(gone)
		a, b := q.Enter(), q.Enter()
		if err := b.Wait(t.Context(), gone, nil); !errors.Is(err, plug.ErrLost) {
			t.Errorf("wait for a plugin that is gone: %v", err)
		}
		b.Leave()
		a.Leave()
		if len(q.waiting) != 0 {
			t.Errorf("%d tickets are left", len(q.waiting))
		}
	})
}

func TestQueueOfSeveral(t *testing.T) {
	t.Parallel()
	q := Queue{width: 2}
	has := func(tk *Ticket) bool {
		select {
		case <-tk.turn:
			return true
		default:
			return false
		}
	}
	a, b, c, d := q.Enter(), q.Enter(), q.Enter(), q.Enter()
	if !has(a) || !has(b) || has(c) || has(d) {
		t.Error("not the first two have their turn")
	}
	b.Leave()
	if !has(c) || has(d) {
		t.Error("the third did not get the free place")
	}
	d.Leave()
	e := q.Enter()
	if has(e) {
		t.Error("three have their turn")
	}
	a.Leave()
	if !has(e) {
		t.Error("the last did not get the free place")
	}
	degraded := make(chan struct{})
	close(degraded)
	if err := e.Wait(t.Context(), nil, degraded); !errors.Is(err, ErrDegraded) {
		t.Errorf("wait for a degraded plugin: %v", err)
	}
}

func TestWhatADegradedPluginNeverHeardOfCancelsOut(t *testing.T) {
	t.Parallel()
	m := &Member{phase: Degraded, stir: make(chan struct{}, 1)}
	for _, e := range []Event{
		{Kind: nri.Event_STOP_CONTAINER, Pod: "p", Container: "old"},
		{Kind: nri.Event_CREATE_CONTAINER, Pod: "p", Container: "new"},
		{Kind: nri.Event_STOP_CONTAINER, Pod: "p", Container: "new"},
		{Kind: nri.Event_REMOVE_CONTAINER, Pod: "p", Container: "new"},
		{Kind: nri.Event_REMOVE_CONTAINER, Pod: "p", Container: "old"},
	} {
		if kept, full := m.Keep(e); !kept || full {
			t.Fatalf("%v was not kept", e)
		}
	}
	for _, want := range []nri.Event{nri.Event_STOP_CONTAINER, nri.Event_REMOVE_CONTAINER} {
		if e, ok := m.Next(); !ok || e.Kind != want || e.Container != "old" {
			t.Errorf("next is %v, want %v of old", e, want)
		}
	}
	if e, ok := m.Next(); ok {
		t.Errorf("%v is left", e)
	}
	for range MaxBacklog {
		m.Keep(Event{Kind: nri.Event_START_CONTAINER})
	}
	if _, full := m.Keep(Event{Kind: nri.Event_START_CONTAINER}); !full {
		t.Error("there is no bound")
	}
}

func TestMemberRemembersEnds(t *testing.T) {
	t.Parallel()
	m := &Member{objects: make(map[string]object.Stage)}
	m.Learn("a", object.Known)
	if !m.ClaimStop("a") || m.ClaimStop("a") {
		t.Error("stop is not told exactly once")
	}
	if !m.ClaimRemoval("a") || m.ClaimRemoval("a") || m.ClaimStop("a") {
		t.Error("removal is not told exactly once, or is followed by a stop")
	}
	for i := range maxTombstones {
		m.ClaimRemoval(string(rune(i + 1000)))
	}
	if len(m.objects) != maxTombstones || m.StageOf("a") != 0 {
		t.Errorf("%d objects are remembered", len(m.objects))
	}
}
