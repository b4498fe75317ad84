package hub

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/crisp-cri/crisp/services/nri-hub/internal/hub/plug"
)

func TestQueueIsInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var q queue
		first, second, third := q.enter(), q.enter(), q.enter()
		if err := first.wait(t.Context(), nil, nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := third.wait(ctx, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("third had its turn too early: %v", err)
		}
		second.leave() // gives up while waiting
		first.leave()
		if err := third.wait(t.Context(), nil, nil); err != nil {
			t.Error(err)
		}
		third.leave()
		third.leave() // harmless
		gone := make(chan struct{})
		close(gone)
		a, b := q.enter(), q.enter()
		if err := b.wait(t.Context(), gone, nil); !errors.Is(err, plug.ErrLost) {
			t.Errorf("wait for a plugin that is gone: %v", err)
		}
		b.leave()
		a.leave()
		if len(q.waiting) != 0 {
			t.Errorf("%d tickets are left", len(q.waiting))
		}
	})
}

func TestQueueOfSeveral(t *testing.T) {
	t.Parallel()
	q := queue{width: 2}
	has := func(tk *ticket) bool {
		select {
		case <-tk.turn:
			return true
		default:
			return false
		}
	}
	a, b, c, d := q.enter(), q.enter(), q.enter(), q.enter()
	if !has(a) || !has(b) || has(c) || has(d) {
		t.Error("not the first two have their turn")
	}
	b.leave()
	if !has(c) || has(d) {
		t.Error("the third did not get the free place")
	}
	d.leave()
	e := q.enter()
	if has(e) {
		t.Error("three have their turn")
	}
	a.leave()
	if !has(e) {
		t.Error("the last did not get the free place")
	}
	degraded := make(chan struct{})
	close(degraded)
	if err := e.wait(t.Context(), nil, degraded); !errors.Is(err, errDegraded) {
		t.Errorf("wait for a degraded plugin: %v", err)
	}
}

func TestWhatADegradedPluginNeverHeardOfCancelsOut(t *testing.T) {
	t.Parallel()
	m := &member{phase: degraded, stir: make(chan struct{}, 1)}
	for _, e := range []event{
		{kind: nri.Event_STOP_CONTAINER, pod: "p", container: "old"},
		{kind: nri.Event_CREATE_CONTAINER, pod: "p", container: "new"},
		{kind: nri.Event_STOP_CONTAINER, pod: "p", container: "new"},
		{kind: nri.Event_REMOVE_CONTAINER, pod: "p", container: "new"},
		{kind: nri.Event_REMOVE_CONTAINER, pod: "p", container: "old"},
	} {
		if kept, full := m.keep(e); !kept || full {
			t.Fatalf("%v was not kept", e)
		}
	}
	for _, want := range []nri.Event{nri.Event_STOP_CONTAINER, nri.Event_REMOVE_CONTAINER} {
		if e, ok := m.next(); !ok || e.kind != want || e.container != "old" {
			t.Errorf("next is %v, want %v of old", e, want)
		}
	}
	if e, ok := m.next(); ok {
		t.Errorf("%v is left", e)
	}
	for range maxBacklog {
		m.keep(event{kind: nri.Event_START_CONTAINER})
	}
	if _, full := m.keep(event{kind: nri.Event_START_CONTAINER}); !full {
		t.Error("there is no bound")
	}
}

func TestMemberRemembersEnds(t *testing.T) {
	t.Parallel()
	m := &member{objects: make(map[string]stage)}
	m.learn("a", known)
	if !m.claimStop("a") || m.claimStop("a") {
		t.Error("stop is not told exactly once")
	}
	if !m.claimRemoval("a") || m.claimRemoval("a") || m.claimStop("a") {
		t.Error("removal is not told exactly once, or is followed by a stop")
	}
	for i := range maxTombstones {
		m.claimRemoval(string(rune(i + 1000)))
	}
	if len(m.objects) != maxTombstones || m.stageOf("a") != 0 {
		t.Errorf("%d objects are remembered", len(m.objects))
	}
}
