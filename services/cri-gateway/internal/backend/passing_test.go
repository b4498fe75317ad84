package backend

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestInventoryWaitsForOperationsThatWentBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &Hub{}
		ctx, end := h.Begin(t.Context())
		_, endOther := h.Begin(t.Context()) // asked the hub, so nobody waits for it
		defer endOther()
		h.goBy(ctx)
		waited := make(chan error, 1)
		go func() { waited <- h.passing.wait(t.Context()) }()
		synctest.Wait()
		select {
		case err := <-waited:
			t.Fatalf("did not wait for the open operation: %v", err)
		default:
		}
		later, endLater := h.Begin(t.Context())
		defer endLater()
		h.goBy(later)
		end()
		end() // ending twice does no harm
		if err := <-waited; err != nil {
			t.Error(err)
		}
		limited, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := h.passing.wait(limited); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("wait with an open operation: %v, want the deadline", err)
		}
	})
}
