//go:build integration

package crispshim_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/controller"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

const (
	// benchRounds is how many pods are made with each shim, in turn.
	benchRounds = 25
	// memoryRounds is how many pods with a container are measured with each shim, in turn.
	memoryRounds = 3
	// benchExecs is how many execs are run in each container that is measured.
	benchExecs = 8
	// settleTime is how long a pod rests before its memory is read.
	settleTime = 3 * time.Second
)

// bench is what is measured of one shim.
type bench struct {
	handler             pod.Handler
	start, exec         []time.Duration
	pss, rss, dirty     []int
	pssAfter, pssShared []int
}

func median[T int | time.Duration](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// BenchmarkShim measures the stock shim and our own side by side: memory with one container,
// the time from executing the start command to the first answer, and the cost of an exec.
func BenchmarkShim(b *testing.B) {
	dir := shimtest.Dir(b)
	m := newBenchManager(b, dir)
	tasks := controller.NewTasks(m)
	rootfs := shimtest.Rootfs(b, dir)
	stock, ours := &bench{handler: shimtest.Handler(b, dir)}, &bench{handler: shimtest.Crisp(b, dir)}
	for b.Loop() {
		for range benchRounds {
			for _, s := range []*bench{stock, ours} {
				id := s.startOne(b, m)
				if err := m.Shutdown(b.Context(), id); err != nil {
					b.Fatal(err)
				}
			}
		}
		for range memoryRounds {
			for _, s := range []*bench{stock, ours} {
				s.runOne(b, m, tasks, rootfs)
			}
		}
		for _, s := range []*bench{stock, ours} {
			s.runMany(b, m, tasks, rootfs)
		}
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%-8s %10s %10s %10s %14s %14s %12s %12s\n",
		"shim", "pss_kb", "rss_kb", "dirty_kb", "pss_after_kb", "pss_of_five_kb", "start_ms", "exec_ms")
	for _, s := range []*bench{stock, ours} {
		fmt.Fprintf(&out, "%-8s %10d %10d %10d %14d %14d %12.2f %12.2f\n", s.handler.Name, median(s.pss), median(s.rss), median(s.dirty),
			median(s.pssAfter), median(s.pssShared), median(s.start).Seconds()*1e3, median(s.exec).Seconds()*1e3)
	}
	fmt.Fprintf(&out, "pss_ratio=%.3f start_ratio=%.3f\n",
		float64(median(ours.pss))/float64(median(stock.pss)), median(ours.start).Seconds()/median(stock.start).Seconds())
	fmt.Print(out.String())
}

func newBenchManager(b *testing.B, dir string) *shim.Manager {
	b.Helper()
	m, err := shim.New(b.Context(), shim.Config{
		Dir: filepath.Join(dir, "shims"), SocketDir: filepath.Join(dir, "s"), EventsSocket: filepath.Join(dir, "events.sock"),
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := m.Close(); err != nil {
			b.Error(err)
		}
	})
	return m
}

// startOne starts a shim and notes the time.
func (s *bench) startOne(b *testing.B, m *shim.Manager) string {
	b.Helper()
	id := shimtest.ID()
	config := fmt.Sprintf(`{"ociVersion":"1.2.0","annotations":{%q:%q}}`, pod.AnnotationSandboxID, id)
	i, err := m.Create(b.Context(), shim.Spec{SandboxID: id, Handler: s.handler, Config: []byte(config)})
	if err != nil {
		b.Fatal(err)
	}
	began := time.Now()
	if err := i.Start(b.Context()); err != nil {
		b.Fatal(err)
	}
	s.start = append(s.start, time.Since(began))
	return id
}

// container runs a container that sleeps.
func (s *bench) container(b *testing.B, tasks *controller.Tasks, sandboxID, rootfs string) string {
	b.Helper()
	id := shimtest.ID()
	_, err := tasks.Create(b.Context(), port.TaskSpec{
		SandboxID: sandboxID, ContainerID: id, Handler: s.handler,
		Rootfs: []mount.Mount{{Type: "bind", Source: rootfs, Options: []string{"rbind", "ro"}}},
		Spec:   shimtest.Spec(b, sandboxID, id, false, "/bin/sleep", "1000"),
	})
	if err == nil {
		_, err = tasks.Start(b.Context(), sandboxID, id, "")
	}
	if err != nil {
		b.Fatal(err)
	}
	return id
}

// runOne measures a pod with one container, alone on the machine with its shim.
func (s *bench) runOne(b *testing.B, m *shim.Manager, tasks *controller.Tasks, rootfs string) {
	b.Helper()
	sandboxID := s.startOne(b, m)
	id := s.container(b, tasks, sandboxID, rootfs)
	pid := shimPid(b, m, sandboxID)
	time.Sleep(settleTime)
	mem := memoryOf(b, pid)
	s.pss, s.rss, s.dirty = append(s.pss, mem["Pss"]), append(s.rss, mem["Rss"]), append(s.dirty, mem["Pss_Dirty"])
	for range benchExecs {
		began := time.Now()
		s.execOne(b, tasks, sandboxID, id)
		s.exec = append(s.exec, time.Since(began))
	}
	time.Sleep(settleTime)
	s.pssAfter = append(s.pssAfter, memoryOf(b, pid)["Pss"])
	s.end(b, m, tasks, sandboxID, id)
}

// runMany measures five pods at once, which share the pages of the shim's program.
func (s *bench) runMany(b *testing.B, m *shim.Manager, tasks *controller.Tasks, rootfs string) {
	b.Helper()
	pods := map[string]string{}
	for range 5 {
		sandboxID := s.startOne(b, m)
		pods[sandboxID] = s.container(b, tasks, sandboxID, rootfs)
	}
	time.Sleep(settleTime)
	for sandboxID := range pods {
		s.pssShared = append(s.pssShared, memoryOf(b, shimPid(b, m, sandboxID))["Pss"])
	}
	for sandboxID, id := range pods {
		s.end(b, m, tasks, sandboxID, id)
	}
}

func (s *bench) execOne(b *testing.B, tasks *controller.Tasks, sandboxID, id string) {
	b.Helper()
	execID := shimtest.ID()
	err := tasks.Exec(b.Context(), sandboxID, id, port.ExecSpec{ID: execID, Process: shimtest.Process("/bin/true")})
	if err == nil {
		_, err = tasks.Start(b.Context(), sandboxID, id, execID)
	}
	if err == nil {
		_, err = tasks.Wait(b.Context(), sandboxID, id, execID)
	}
	if err == nil {
		_, err = tasks.Delete(b.Context(), sandboxID, id, execID)
	}
	if err != nil {
		b.Fatal(err)
	}
}

func (s *bench) end(b *testing.B, m *shim.Manager, tasks *controller.Tasks, sandboxID, id string) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), 20*time.Second)
	defer cancel()
	err := tasks.Kill(ctx, sandboxID, id, "", syscall.SIGKILL, true)
	if err == nil {
		_, err = tasks.Wait(ctx, sandboxID, id, "")
	}
	if err == nil {
		_, err = tasks.Delete(ctx, sandboxID, id, "")
	}
	if err == nil {
		err = m.Shutdown(ctx, sandboxID)
	}
	if err != nil {
		b.Fatal(err)
	}
}

func shimPid(b *testing.B, m *shim.Manager, sandboxID string) int {
	b.Helper()
	i, err := m.Get(sandboxID)
	if err != nil {
		b.Fatal(err)
	}
	return int(i.Status().Pid)
}

// memoryOf reads the memory of a process in KiB.
func memoryOf(b *testing.B, pid int) map[string]int {
	b.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		b.Fatal(err)
	}
	out := map[string]int{}
	for line := range bytes.Lines(data) {
		key, value, ok := strings.Cut(string(line), ":")
		if !ok {
			continue
		}
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		if err == nil {
			out[key] = n
		}
	}
	return out
}
