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

	// killing is held by who kills a process and starts it again.
	killing sync.Mutex
	// aim is the kill that a step of a pod's life sets off.
	aim aimed

	mu sync.Mutex
	// promises by container.
	promises   map[string]promise
	shimKilled bool
	steps      map[step]int // how many have begun
	hits       sync.WaitGroup
}

// aimed is a kill at a moment of a step.
type aimed struct {
	step   step
	nth    int // of the steps of this kind
	after  time.Duration
	victim testenv.Process
}

// handlers are what the rounds' pods are run with, in turn.
var handlers = [...]string{handlerStock, handlerCrisp, handlerStock, handlerCrispAPI}

// aimAt draws the kill at a step. The steps, and who is killed in them, follow each other, so
// that 24 rounds have every combination with both shims.
func (r *round) aimAt() aimed {
	rng := r.random(100)
	n := r.number / len(handlers)
	steps := [...]step{stepRun, stepCreate, stepStart, stepExec, stepStop, stepRemove}
	victims := [...]testenv.Process{testenv.Sandboxd, shim}
	window := 80 * time.Millisecond
	if steps[n%len(steps)] == stepRun {
		window = 250 * time.Millisecond
	}
	return aimed{
		step: steps[n%len(steps)], nth: rng.IntN(3), after: time.Duration(rng.Int64N(int64(window))),
		victim: victims[(r.number+n/len(steps))%len(victims)],
	}
}

// began hears of a step, and kills if it is the one.
func (r *round) began(ctx context.Context, s step, pod string) {
	r.mu.Lock()
	n := r.steps[s]
	r.steps[s]++
	r.mu.Unlock()
	if s != r.aim.step || n != r.aim.nth {
		return
	}
	r.hits.Go(func() {
		if !pause(ctx, r.aim.after) {
			return
		}
		if err := r.kill(ctx, r.aim.victim, pod); err != nil {
			r.t.Errorf("kill %s at %s: %v", r.aim.victim, s, err)
		}
	})
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
	r.aim, r.steps = r.aimAt(), map[step]int{}
	k := &kubelet{s: r.s, t: r.t, handler: handlers[r.number%len(handlers)], step: func(s step, pod string) { r.began(ctx, s, pod) }}
	r.t.Logf("seed %d, handler %s, kills %v, and %s %s after the begin of %s number %d",
		r.seed, k.handler, kills, r.aim.victim, r.aim.after, r.aim.step, r.aim.nth)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { r.work(ctx, k, w) })
	}
	wg.Go(func() { r.killAll(ctx, kills) })
	wg.Wait()
	r.hits.Wait()
	if err := r.s.WaitReady(ctx); err != nil {
		r.t.Errorf("after the kills: %v", err)
		return
	}
	worked := time.Since(began)
	r.verify("state with pods", checkState(ctx, r.s))
	r.verify("removal of all pods", k.removeAll(ctx))
	r.hits.Wait()
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
		if err := r.kill(ctx, k.victim, ""); err != nil {
			r.t.Errorf("kill %s: %v", k.victim, err)
		}
	}
}

// kill kills a process, and starts it again if it is one of the four.
func (r *round) kill(ctx context.Context, victim testenv.Process, pod string) error {
	if victim == shim {
		return r.killShim(pod)
	}
	r.killing.Lock()
	defer r.killing.Unlock()
	return errors.Join(r.s.Kill(ctx, victim), r.s.Run(victim))
}

// killShim kills the shim of a pod, or, without one, any of those that run now.
func (r *round) killShim(pod string) error {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	var pids []int
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(text), "containerd-shim") || !strings.Contains(string(text), r.s.Path()) || !strings.Contains(string(text), pod) {
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
func (r *round) work(ctx context.Context, k *kubelet, number int) {
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
		if err := r.live(ctx, k, rng, pod, id, code); err != nil {
			return fmt.Errorf("container %d: %w", n, err)
		}
	}
	return nil
}

// live uses a container that was started.
func (r *round) live(ctx context.Context, k *kubelet, rng *rand.Rand, pod, id string, code int32) error {
	if code < 0 {
		for range rng.IntN(3) {
			if err := k.exec(ctx, pod, id); err != nil {
				return err
			}
		}
		if rng.IntN(2) == 0 {
			return nil
		}
		if err := k.stopContainer(ctx, pod, id, int64(rng.IntN(3))); err != nil {
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
		return k.removeContainer(ctx, pod, id)
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
