//go:build integration

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/leak"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const (
	workers     = 4
	podsPerWork = 2
	// killWindow is the time in which the kills of a round happen.
	killWindow = 3 * time.Second
)

// shim is the victim that is none of the four processes.
const shim = testenv.Process("shim")

// round is one round.
type round struct {
	t      *testing.T
	s      *testenv.System
	number int
	seed   uint64
	events *stream

	mu sync.Mutex
	// promises by container.
	promises   map[string]promise
	shimKilled bool
}

// promise is what was told of a container over CRI.
type promise struct {
	name    string
	started bool
	// code is the exit code of the status; -1 if it was not seen.
	code int32
}

// kill is one kill of the plan.
type kill struct {
	after  time.Duration
	victim testenv.Process
}

func (r *round) random(stream int) *rand.Rand {
	return rand.New(rand.NewPCG(r.seed, uint64(r.number)<<8|uint64(stream)))
}

// plan draws the kills: sandboxd, which holds everything, more often than the others.
func (r *round) plan() []kill {
	rng := r.random(0)
	victims := []testenv.Process{
		testenv.Sandboxd, testenv.Sandboxd, testenv.Sandboxd, testenv.Gateway, testenv.Gateway, testenv.NRIHub, testenv.EventBus, shim,
	}
	kills := make([]kill, 1+rng.IntN(4))
	for i := range kills {
		kills[i] = kill{time.Duration(rng.Int64N(int64(killWindow))), victims[rng.IntN(len(victims))]}
	}
	slices.SortFunc(kills, func(a, b kill) int { return int(a.after - b.after) })
	return kills
}

func (r *round) run(ctx context.Context) {
	before, err := leak.Take(ctx, r.s.LeakScope())
	if err != nil {
		r.t.Fatal(err)
	}
	r.promises = map[string]promise{}
	began := time.Now()
	kills := r.plan()
	r.t.Logf("seed %d, kills %v", r.seed, kills)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { r.work(ctx, w) })
	}
	wg.Go(func() { r.killAll(ctx, kills) })
	wg.Wait()
	if err := r.s.WaitReady(ctx); err != nil {
		r.t.Errorf("after the kills: %v", err)
		return
	}
	worked := time.Since(began)
	r.verify("state with pods", checkState(ctx, r.s))
	r.verify("removal of all pods", (&kubelet{r.s, r.t}).removeAll(ctx))
	r.verify("state without pods", checkState(ctx, r.s))
	r.verify("processes", checkProcesses(ctx))
	r.verify("leaks", checkLeaks(ctx, before, r.s.LeakScope()))
	r.verify("events", r.checkEvents(ctx))
	r.t.Logf("%d containers, worked %.1f s, %.1f s in all", len(r.promises), worked.Seconds(), time.Since(began).Seconds())
}

func (r *round) verify(what string, err error) {
	if err != nil {
		r.t.Errorf("%s: %v", what, err)
	}
}

// killAll carries out the plan.
func (r *round) killAll(ctx context.Context, kills []kill) {
	began := time.Now()
	for _, k := range kills {
		if !pause(ctx, k.after-time.Since(began)) {
			return
		}
		var err error
		if k.victim == shim {
			err = r.killShim()
		} else {
			err = errors.Join(r.s.Kill(ctx, k.victim), r.s.Run(k.victim))
		}
		if err != nil {
			r.t.Errorf("kill %s: %v", k.victim, err)
		}
	}
}

// killShim kills one of the shims that run now, if any does.
func (r *round) killShim() error {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	var pids []int
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(text), "containerd-shim") || !strings.Contains(string(text), r.s.Path()) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return err
		}
		pids = append(pids, pid)
	}
	if len(pids) == 0 {
		return nil
	}
	r.mu.Lock()
	r.shimKilled = true
	r.mu.Unlock()
	err = syscall.Kill(pids[r.random(1).IntN(len(pids))], syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}

// work is one caller: it brings up pods one after the other.
func (r *round) work(ctx context.Context, number int) {
	k := &kubelet{r.s, r.t}
	rng := r.random(2 + number)
	for n := range podsPerWork {
		name := fmt.Sprintf("r%d-w%d-p%d", r.number, number, n)
		if err := r.syncPod(ctx, k, rng, name); err != nil {
			r.t.Errorf("pod %s: %v", name, err)
		}
	}
}

// syncPod makes a pod and its containers, with a new attempt whenever the pod is lost.
func (r *round) syncPod(ctx context.Context, k *kubelet, rng *rand.Rand, name string) error {
	config := podConfig(r.s, name, rng)
	containers := 1 + rng.IntN(3)
	const attempts = 8
	for attempt := range uint32(attempts) {
		config.Metadata.Attempt = attempt
		id, err := k.runPod(ctx, config)
		if err == nil {
			err = r.syncContainers(ctx, k, rng, id, config, containers)
		}
		if err == nil {
			if rng.IntN(3) > 0 {
				return nil // It is removed at the round's end.
			}
			return k.removePod(ctx, id)
		}
		if ctx.Err() != nil {
			return err
		}
		r.t.Logf("pod %s attempt %d is lost: %v", name, attempt, err)
		if id != "" {
			if err := k.stopPod(ctx, id); err != nil {
				return err
			}
		}
	}
	return fmt.Errorf("lost %d times", attempts)
}

func (r *round) syncContainers(ctx context.Context, k *kubelet, rng *rand.Rand, pod string, config *criv1.PodSandboxConfig, count int) error {
	for n := range count {
		code := int32(-1) // runs until it is stopped
		script := "trap 'exit 0' TERM; while true; do sleep 0.1; done"
		if rng.IntN(2) == 0 {
			code = int32(rng.IntN(100))
			script = fmt.Sprintf("sleep %.1f; exit %d", rng.Float64(), code)
		}
		c := containerConfig(fmt.Sprintf("c%d", n), script)
		id, err := k.runContainer(ctx, pod, config, c)
		if err != nil {
			return fmt.Errorf("container %d: %w", n, err)
		}
		r.note(id, promise{name: config.GetMetadata().GetName() + "/" + c.GetMetadata().GetName(), started: true, code: -1})
		if err := r.live(ctx, k, rng, id, code); err != nil {
			return fmt.Errorf("container %d: %w", n, err)
		}
	}
	return nil
}

// live uses a container that was started.
func (r *round) live(ctx context.Context, k *kubelet, rng *rand.Rand, id string, code int32) error {
	if code < 0 {
		for range rng.IntN(3) {
			if err := k.exec(ctx, id); err != nil {
				return err
			}
		}
		if rng.IntN(2) == 0 {
			return nil
		}
		if err := k.stopContainer(ctx, id, int64(rng.IntN(3))); err != nil {
			return err
		}
	}
	status, err := k.waitEnd(ctx, id)
	if err != nil {
		return err
	}
	p := r.promiseOf(id)
	p.code = status.GetExitCode()
	r.note(id, p)
	r.mu.Lock()
	excused := r.shimKilled
	r.mu.Unlock()
	if code >= 0 && status.GetExitCode() != code && !excused {
		r.t.Errorf("container %s: exit code %d (%s: %s), want %d", id, status.GetExitCode(), status.GetReason(), status.GetMessage(), code)
	}
	if status.GetFinishedAt() < status.GetStartedAt() || status.GetStartedAt() < status.GetCreatedAt() {
		r.t.Errorf("container %s: created %d, started %d, finished %d", id, status.GetCreatedAt(), status.GetStartedAt(), status.GetFinishedAt())
	}
	if rng.IntN(2) == 0 {
		return k.removeContainer(ctx, id)
	}
	return nil
}

func (r *round) note(id string, p promise) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.promises[id] = p
}

func (r *round) promiseOf(id string) promise {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.promises[id]
}
