package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// bus is a bus that can be away.
type bus struct {
	mu   sync.Mutex
	away bool
	got  []string
}

func (b *bus) publish(_ context.Context, e *recordv1.Event) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.away {
		return errors.New("bus is away")
	}
	b.got = append(b.got, e.GetMessageId())
	return nil
}

func (b *bus) set(away bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.away = away
}

func (b *bus) ids() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.got)
}

func start(t *testing.T, b *bus, limit int) *store.Store {
	t.Helper()
	st, err := store.Open(filepath.Join(t.TempDir(), "records.db"))
	if err != nil {
		t.Fatal(err)
	}
	r := New(st, b.publish, limit, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		err := errors.Join(<-done, st.Close())
		if err != nil {
			t.Error(err)
		}
	})
	return st
}

func add(t *testing.T, st *store.Store, id string, keep bool) {
	t.Helper()
	err := st.Update(t.Context(), func(tx *store.Tx) error {
		return tx.AppendEvent(&recordv1.Event{MessageId: id, Keep: keep})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		if !ok() {
			return errors.New("not yet: " + what)
		}
		return nil
	})
}

func TestEventsArriveOnceInOrderAfterTheBusWasAway(t *testing.T) {
	b := &bus{away: true}
	st := start(t, b, 1000)
	var want []string
	for i := range 200 {
		id := fmt.Sprint(i)
		want = append(want, id)
		add(t, st, id, true)
	}
	b.set(false)
	eventually(t, "empty outbox", func() bool { return st.EventCount() == 0 })
	if got := b.ids(); !slices.Equal(got, want) {
		t.Errorf("got %d events %v, want %d in order", len(got), got, len(want))
	}
}

func TestFullOutboxDropsDispensableEventsFirst(t *testing.T) {
	b := &bus{away: true}
	st := start(t, b, 10)
	for i := range 20 {
		add(t, st, fmt.Sprintf("start-%02d", i), false)
		if i%4 == 0 {
			add(t, st, fmt.Sprintf("exit-%02d", i), true)
		}
	}
	eventually(t, "trimmed outbox", func() bool { return st.EventCount() <= 10 })
	b.set(false)
	eventually(t, "empty outbox", func() bool { return st.EventCount() == 0 })
	exits, gaps := 0, 0
	for _, id := range b.ids() {
		switch {
		case id[:4] == "exit":
			exits++
		case id[:3] == "gap":
			gaps++
		}
	}
	if exits != 5 || gaps == 0 {
		t.Errorf("got %v: %d exits, %d gaps; want all 5 exits and a gap", b.ids(), exits, gaps)
	}
}
