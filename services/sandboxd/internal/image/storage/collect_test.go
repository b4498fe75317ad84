package storage

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// A stop does not wait for the folders of thousands of containers.
func TestStopDuringALongCollection(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		c := startCollector(t.Context(), func(context.Context) error {
			<-release
			return nil
		}, slog.New(slog.DiscardHandler))
		c.soon()
		time.Sleep(2 * collectDelay)
		begin := time.Now()
		c.stop()
		if took := time.Since(begin); took != stopPatience {
			t.Errorf("the stop took %v", took)
		}
		close(release)
		synctest.Wait()
		if err := c.now(t.Context()); err == nil {
			t.Error("a collection after the stop")
		}
	})
}
