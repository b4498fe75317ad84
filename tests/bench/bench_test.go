//go:build bench

package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crisp-cri/crisp/tests/testenv"
)

func TestMain(m *testing.M) {
	if socket := os.Getenv(socketVariable); socket != "" {
		os.Exit(servePlugins(socket))
	}
	os.Exit(testenv.Main(context.Background(), withSummary{m}))
}

// withSummary prints the summary after the measurements.
type withSummary struct{ *testing.M }

// Run implements testenv.Runner.
func (s withSummary) Run() int {
	code := s.M.Run()
	fmt.Println(strings.Join(summary, " "))
	return code
}

// summary is the last line.
var summary []string

func summarise(name string, d, to time.Duration) {
	summary = append(summary, fmt.Sprintf("%s=%.2f", name, ratio(d, to)))
}

// median of what was measured.
func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// steps of a pod's life, in order.
var steps = []string{"RunPodSandbox", "CreateContainer", "StartContainer", "ExecSync", "stop and remove container", "stop and remove pod"}

// TestSteps measures the steps of a pod with one container, one pod at a time and ten at once.
func TestSteps(t *testing.T) {
	ours, theirs := startBoth(t)
	for _, pods := range []int{1, 10} {
		rounds := 24 / min(pods, 6)
		took := map[*node][][]time.Duration{ours: make([][]time.Duration, len(steps)), theirs: make([][]time.Duration, len(steps))}
		for range rounds {
			for _, n := range []*node{ours, theirs} {
				for step, d := range lives(t, n, pods) {
					took[n][step] = append(took[n][step], d...)
				}
			}
		}
		fmt.Printf("median of %d, with %d at once:     crisp  containerd  crisp/containerd\n", rounds*pods, pods)
		var sums [2]time.Duration
		for i, step := range steps {
			a, b := median(took[ours][i]), median(took[theirs][i])
			fmt.Printf("  %-28s %9.2f ms %9.2f ms %8.2f\n", step, ms(a), ms(b), ratio(a, b))
			if i < 3 {
				sums[0], sums[1] = sums[0]+a, sums[1]+b
			}
		}
		fmt.Printf("  %-28s %9.2f ms %9.2f ms %8.2f\n", "start of a pod (first three)", ms(sums[0]), ms(sums[1]), ratio(sums[0], sums[1]))
		if pods == 1 {
			summarise("start_ratio", sums[0], sums[1])
		}
	}
}

func ms(d time.Duration) float64               { return float64(d) / float64(time.Millisecond) }
func ratio(ours, theirs time.Duration) float64 { return float64(ours) / float64(theirs) }

// lives lets pods live side by side, and gives what each took for each step.
func lives(t *testing.T, n *node, pods int) (took [][]time.Duration) {
	t.Helper()
	took = make([][]time.Duration, len(steps))
	var mu sync.Mutex
	side(t, pods, func(int) *pod { return n.newPod() }, func(ctx context.Context, p *pod) error {
		var id string
		for step, do := range []func() error{
			func() error { return p.run(ctx) },
			func() (err error) { id, err = p.create(ctx); return err },
			func() error { return p.start(ctx, id) },
			func() error { return p.exec(ctx, id) },
			func() error { return p.end(ctx, id) },
			func() error { return p.remove(ctx) },
		} {
			begin := time.Now()
			if err := do(); err != nil {
				return fmt.Errorf("%s: %s: %w", n.name, steps[step], err)
			}
			d := time.Since(begin)
			mu.Lock()
			took[step] = append(took[step], d)
			mu.Unlock()
		}
		return nil
	})
	return took
}

// side does something with pods side by side.
func side(t *testing.T, count int, pick func(int) *pod, do func(context.Context, *pod) error) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range count {
		p := pick(i)
		wg.Go(func() {
			if err := do(t.Context(), p); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// TestPlugins measures what 1, 3 and 10 plugins add to a CreateContainer, with one pod and with
// fifty at once. Creations of the two runtimes alternate, and each round has all numbers of
// plugins: what plugins add is compared within a round, so that a machine that is slower for some
// rounds does not count for or against anybody.
func TestPlugins(t *testing.T) {
	ours, theirs := startBoth(t)
	counts := []int{0, 1, 3, 10}
	fmt.Println("CreateContainer, median of what its caller waits; added: more than without plugins, median of the rounds")
	fmt.Println("plugins pods      crisp   added   containerd   added   added ratio")
	for _, pods := range []int{1, 50} {
		running := map[*node][]*pod{}
		for _, n := range []*node{ours, theirs} {
			running[n] = n.runPods(t, pods)
		}
		// The median of each round, by number of plugins.
		took := map[*node]map[int][]time.Duration{ours: {}, theirs: {}}
		rounds, each := 72, 6
		if pods > 1 {
			rounds, each = 15, 2
		}
		for range rounds {
			for _, count := range counts {
				doneOurs, doneTheirs := ours.connect(t, count, 0), theirs.connect(t, count, 0)
				round := map[*node][]time.Duration{}
				for range each {
					for _, n := range []*node{ours, theirs} {
						round[n] = append(round[n], creations(t, running[n])...)
						time.Sleep(rest)
					}
				}
				for n, d := range round {
					took[n][count] = append(took[n][count], median(d))
				}
				doneOurs()
				doneTheirs()
			}
		}
		var sums [2]time.Duration
		for _, count := range counts {
			moreA, moreB := added(took[ours], count), added(took[theirs], count)
			a, b := median(slices.Clone(took[ours][count])), median(slices.Clone(took[theirs][count]))
			fmt.Printf("%7d %4d %7.2f ms %7.2f %9.2f ms %7.2f", count, pods, ms(a), ms(moreA), ms(b), ms(moreB))
			if count > 0 {
				fmt.Printf(" %10.2f", ratio(moreA, moreB))
			}
			fmt.Println()
			sums[0], sums[1] = sums[0]+moreA, sums[1]+moreB
		}
		if pods == 1 {
			summarise("single_ratio", sums[0], sums[1])
		}
		for _, n := range []*node{ours, theirs} {
			removePods(t, running[n])
		}
	}
}

// added is how much longer a round took with so many plugins than the same round without any.
func added(took map[int][]time.Duration, count int) time.Duration {
	var more []time.Duration
	for round, d := range took[count] {
		more = append(more, d-took[0][round])
	}
	return median(more)
}

// TestSlowPlugin measures ten creations at once through a plugin that takes 100 ms for each, and
// that may have several in flight.
func TestSlowPlugin(t *testing.T) {
	const pods, rounds = 10, 7
	ours, theirs := startBoth(t)
	took := map[*node][]time.Duration{}
	for range rounds {
		for _, n := range []*node{ours, theirs} {
			running := n.runPods(t, pods)
			done := n.connect(t, 1, 100*time.Millisecond)
			begin := time.Now()
			side(t, pods, func(i int) *pod { return running[i] }, func(ctx context.Context, p *pod) error {
				_, err := p.create(ctx)
				return err
			})
			took[n] = append(took[n], time.Since(begin))
			done()
			removePods(t, running)
		}
	}
	a, b := median(took[ours]), median(took[theirs])
	fmt.Printf("ten CreateContainer at once through a plugin that takes 100 ms: crisp %.0f ms, containerd %.0f ms\n", ms(a), ms(b))
	summarise("parallel_ratio", b, a)
}

// rest is between two measurements: what a runtime does after its answer, such as to write what
// plugins have changed, is not to be measured as the other's. The longest that Crisp puts off its
// writing is 50 ms.
const rest = 100 * time.Millisecond

// creations makes and removes a container in each pod, all at once, and gives what each creation took.
func creations(t *testing.T, pods []*pod) (took []time.Duration) {
	t.Helper()
	var mu sync.Mutex
	side(t, len(pods), func(i int) *pod { return pods[i] }, func(ctx context.Context, p *pod) error {
		begin := time.Now()
		id, err := p.create(ctx)
		d := time.Since(begin)
		if err != nil {
			return fmt.Errorf("%s: %w", p.node.name, err)
		}
		mu.Lock()
		took = append(took, d)
		mu.Unlock()
		return p.removeContainer(ctx, id)
	})
	return took
}
