package cadvisor_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/cadvisor"
)

// cgroups notes what is made and removed.
type cgroups struct {
	mu    sync.Mutex
	calls []string
	fails map[string]error // by call
}

func (c *cgroups) note(call string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, call)
	return c.fails[call]
}

func (c *cgroups) fail(calls map[string]error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fails = calls
}

func (c *cgroups) Make(id, path string) error { return c.note("make " + id + " " + path) }

func (c *cgroups) Remove(id, path string) error { return c.note("remove " + id + " " + path) }

// expect waits for two rounds and compares the calls since the last time.
func (c *cgroups) expect(t *testing.T, when string, want ...string) {
	t.Helper()
	time.Sleep(5 * time.Second)
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.Sort(c.calls)
	if diff := cmp.Diff(want, c.calls); diff != "" {
		t.Errorf("%s (-want +got):\n%s", when, diff)
	}
	c.calls = nil
}

// changing are records that a test changes between the rounds. Nothing else orders its changes and
// what a later round reads.
type changing struct {
	records

	mu sync.Mutex
}

func (r *changing) Sandboxes() ([]*recordv1.Sandbox, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.records.Sandboxes()
}

func (r *changing) change(how func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	how()
}

func pods() *changing {
	r := records{known: make(chan struct{}), sandboxes: map[string]*recordv1.Sandbox{}}
	for _, id := range []string{"plain", "init", "host"} {
		s := sandbox(id, 0, ready)
		s.NetnsPath = "/run/" + id
		r.sandboxes[id] = s
		r.containers = append(r.containers, container(id+"1", id, 10, running))
	}
	r.sandboxes["init"].Pid = 70
	r.sandboxes["host"].NetnsPath = ""
	return &changing{records: r}
}

// keep keeps groups and returns what ends that.
func keep(t *testing.T, r cadvisor.Records, c *cgroups) func() {
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	g := cadvisor.NewGroups(r, c, slog.New(slog.DiscardHandler))
	go func() { done <- g.Run(ctx, func() {}) }()
	return func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestGroupsFollowTheProcessesOfPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, c := pods(), &cgroups{}
		stop := keep(t, r, c)
		c.expect(t, "before the state is known")
		close(r.known)
		c.expect(t, "at first", "make plain /pods/plain", "remove plain /pods/plain")
		r.change(func() { r.containers = append(r.containers, container("plain2", "plain", 11, running)) })
		c.expect(t, "after a second container")
		r.change(func() { r.containers[0].State = exited })
		c.expect(t, "after the end of the first", "make plain /pods/plain", "remove plain /pods/plain")
		r.change(func() { r.sandboxes["plain"].ExitedAt = timestamppb.Now() })
		c.expect(t, "after the end of the pod", "remove plain /pods/plain")
		r.change(func() { r.sandboxes["plain"].ExitedAt = nil })
		c.expect(t, "again", "make plain /pods/plain")
		r.change(func() { delete(r.sandboxes, "plain") })
		c.expect(t, "after its removal", "remove plain /pods/plain")
		stop()
		c.expect(t, "after the stop")
	})
}

func TestGroupsAreGoneAfterTheStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, c := pods(), &cgroups{}
		close(r.known)
		stop := keep(t, r, c)
		c.expect(t, "at first", "make plain /pods/plain", "remove plain /pods/plain")
		stop()
		c.expect(t, "after the stop", "remove plain /pods/plain")
	})
}

func TestGroupsThatFailAreTriedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const made, removed = "make plain /pods/plain", "remove plain /pods/plain"
		r := pods()
		c := &cgroups{fails: map[string]error{made: fmt.Errorf("parent: %w", errdefs.ErrNotFound)}}
		close(r.known)
		stop := keep(t, r, c)
		c.expect(t, "without a parent", made, made, made, removed)
		c.fail(map[string]error{removed: errors.New("busy")})
		c.expect(t, "with one", made)
		r.change(func() { r.containers = nil })
		c.expect(t, "while it is busy", removed, removed)
		c.fail(nil)
		c.expect(t, "then", removed)
		stop()
		c.expect(t, "after the stop")
	})
}
