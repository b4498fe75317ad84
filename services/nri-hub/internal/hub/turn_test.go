package hub

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestQueueIsInOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var q queue
		first, second, third := q.enter(), q.enter(), q.enter()
		if err := first.wait(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := third.wait(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("third had its turn too early: %v", err)
		}
		second.leave() // gives up while waiting
		first.leave()
		if err := third.wait(t.Context(), nil); err != nil {
			t.Error(err)
		}
		third.leave()
		third.leave() // harmless
		gone := make(chan struct{})
		close(gone)
		a, b := q.enter(), q.enter()
		if err := b.wait(t.Context(), gone); !errors.Is(err, ErrLost) {
			t.Errorf("wait for a plugin that is gone: %v", err)
		}
		b.leave()
		a.leave()
		if len(q.waiting) != 0 {
			t.Errorf("%d tickets are left", len(q.waiting))
		}
	})
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
