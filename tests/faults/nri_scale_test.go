//go:build integration

package faults

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// SF-37: a plugin that joins a node whose inventory is larger than a message gets all of it.
// With a hundredfold scale these are the 3000 containers of an ordinary size that are to be
// synchronised; with less, larger ones make up for it.
func TestInventoryLargerThanAMessage(t *testing.T) {
	const variables, least = 100, 7 << 20 // bytes in all: three messages
	s := start(t, testenv.Setup{})
	n := scaled(t, 30)
	value := strings.Repeat("v", max(least/n/variables, 20))
	pod := s.podConfig("crowd")
	id := s.pod(pod, "")
	var creating errgroup.Group
	creating.SetLimit(4)
	for i := range n {
		creating.Go(func() error {
			c := script(fmt.Sprintf("c%d", i), "true")
			c.Annotations = map[string]string{"note": strings.Repeat("a", 3<<10)}
			for v := range variables {
				c.Envs = append(c.Envs, &criv1.KeyValue{Key: fmt.Sprintf("VARIABLE_%d", v), Value: []byte(value)})
			}
			_, err := s.create(id, pod, c)
			return err
		})
	}
	must(t, creating.Wait())
	b := newBookkeeper()
	begin := time.Now()
	s.connect(b, "10", "late")
	eventually(t, 60*time.Second, "the plugin has all", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if len(b.booked) != n+1 {
			return fmt.Errorf("it has %d of %d", len(b.booked), n+1)
		}
		return nil
	})
	t.Logf("%d containers were synchronised after %v", n, time.Since(begin))
	if b.synchronized() != 1 {
		t.Errorf("synchronised %d times", b.synchronized())
	}
	s.container(id, pod, script("one-more", "sleep 1000"))
	must(t, s.removePod(id))
	eventually(t, 120*time.Second, "books are balanced", func() error { return b.balance(n + 2) })
}

// SF-39: the hub is away for longer than calls are held. Pods come and go without it, and the
// plugin learns afterwards of what is there, and of the end of what it knew.
func TestHubAwayForLong(t *testing.T) {
	s := start(t, testenv.Setup{Configure: func(p testenv.Process, c testenv.Settings) {
		if p == testenv.Gateway {
			c.Set("nri.hold", "1s")
		}
	}})
	b := newBookkeeper()
	s.connect(b, "10", "books")
	keep, gone := s.podConfig("keeps"), s.podConfig("goes-meanwhile")
	kept, going := s.pod(keep, ""), s.pod(gone, "")
	s.container(kept, keep, script("keeps", "sleep 1000"))
	s.container(going, gone, script("goes", "sleep 1000"))

	must(t, s.Kill(t.Context(), testenv.NRIHub))
	over := time.Now().Add(time.Duration(scaled(t, 3)) * time.Second)
	var load sync.WaitGroup
	var mu sync.Mutex
	var stayed []string // pods that were made without the hub and are there when it comes back
	slowest := time.Duration(0)
	for worker := range 2 {
		load.Go(func() {
			for n := 0; n == 0 || time.Now().Before(over); n++ {
				config := s.podConfig(fmt.Sprintf("away-%d-%d", worker, n))
				begin := time.Now()
				id, err := s.try(config, "", 60*time.Second)
				if err != nil {
					t.Errorf("a pod failed because the hub is away: %v", err)
					return
				}
				if _, err := s.create(id, config, script("c", "sleep 1000")); err != nil {
					t.Errorf("a container failed because the hub is away: %v", err)
				}
				mu.Lock()
				slowest = max(slowest, time.Since(begin))
				if n == 0 {
					stayed = append(stayed, id)
				}
				mu.Unlock()
				if n == 0 {
					continue
				}
				if err := s.removePod(id); err != nil {
					t.Errorf("a removal failed because the hub is away: %v", err)
				}
			}
		})
	}
	must(t, s.removePod(going))
	load.Wait()
	t.Logf("slowest pod without the hub: %v", slowest)

	must(t, s.Run(testenv.NRIHub))
	eventually(t, 60*time.Second, "the plugin knows what is there and what has gone", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		var missing []string
		for _, id := range append([]string{kept}, stayed...) {
			if _, ok := b.booked[id]; !ok {
				missing = append(missing, id)
			}
		}
		if _, still := b.booked[going]; still || len(missing) > 0 || len(b.booked) != 2*(1+len(stayed)) {
			return fmt.Errorf("booked %v, missing %v, gone %v", b.booked, missing, going)
		}
		return nil
	})
	for _, id := range append(stayed, kept) {
		must(t, s.removePod(id))
	}
	eventually(t, 60*time.Second, "books are balanced", func() error { return b.balance(2 * (2 + len(stayed))) })
}
