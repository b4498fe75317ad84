package lifecycle_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/internal/lifecycle"
	"github.com/crisp-cri/crisp/services/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// journal collects what parts do, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

// part starts after a second, runs until told to stop and takes a second to do so.
func (j *journal) part(name string) lifecycle.Part {
	return lifecycle.Part{Name: name, Run: func(ctx context.Context, ready func()) error {
		time.Sleep(time.Second)
		j.add("start " + name)
		ready()
		<-ctx.Done()
		time.Sleep(time.Second)
		j.add("stop " + name)
		return ctx.Err()
	}}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestPartsStopInReverseOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := lifecycle.Run(ctx, quiet(), j.part("a"), j.part("b"), j.part("c")); err != nil {
			t.Fatal(err)
		}
		want := []string{"start a", "start b", "start c", "stop c", "stop b", "stop a"}
		if diff := cmp.Diff(want, j.lines); diff != "" {
			t.Error(diff)
		}
	})
}

func TestFailureAtStartStopsWhatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		broken := errors.New("disk is gone")
		fail := lifecycle.Part{Name: "b", Run: func(context.Context, func()) error { return broken }}
		err := lifecycle.Run(t.Context(), quiet(), j.part("a"), fail, j.part("c"))
		if !errors.Is(err, broken) || strings.Count(err.Error(), "disk is gone") != 1 {
			t.Errorf("got %v, want the failure once", err)
		}
		if diff := cmp.Diff([]string{"start a", "stop a"}, j.lines); diff != "" {
			t.Error(diff)
		}
	})
}

func TestPartThatEndsEndsTheProcess(t *testing.T) {
	for name, tc := range map[string]struct {
		run  func(ctx context.Context, ready func()) error
		want string
	}{
		"return": {func(_ context.Context, ready func()) error { ready(); return nil }, "b: ended without being asked to"},
		"error": {func(_ context.Context, ready func()) error {
			ready()
			time.Sleep(time.Minute)
			return errors.New("broke")
		}, "b: broke"},
		"panic": {func(_ context.Context, ready func()) error { ready(); panic("oh") }, "b: panic: oh"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var j journal
				err := lifecycle.Run(t.Context(), quiet(), j.part("a"), lifecycle.Part{Name: "b", Run: tc.run})
				if err == nil || err.Error() != tc.want {
					t.Errorf("got %v, want %q", err, tc.want)
				}
				if diff := cmp.Diff([]string{"start a", "stop a"}, j.lines); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

func TestSlowPartIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		release := make(chan struct{})
		slow := lifecycle.Part{Name: "slow", StopTimeout: 3 * time.Second, Run: func(_ context.Context, ready func()) error {
			ready()
			<-release
			return nil
		}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		err := lifecycle.Run(ctx, quiet(), j.part("a"), slow)
		close(release)
		if err == nil || err.Error() != "slow: did not stop within 3s" {
			t.Errorf("got %v", err)
		}
		// One minute of life, three seconds for the slow part, one for the other.
		if took := time.Since(began); took != 64*time.Second {
			t.Errorf("took %v", took)
		}
		if diff := cmp.Diff([]string{"start a", "stop a"}, j.lines); diff != "" {
			t.Error(diff)
		}
	})
}

func TestStopDuringStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		if err := lifecycle.Run(ctx, quiet(), j.part("a"), j.part("b"), j.part("c")); err != nil {
			t.Fatal(err)
		}
		want := []string{"start a", "start b", "stop b", "stop a"}
		if diff := cmp.Diff(want, j.lines); diff != "" {
			t.Error(diff)
		}
	})
}

// TestServiceManagerIsTold uses the real socket protocol, so its time is real, too.
func TestServiceManagerIsTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "40000")
	const end = "END=1" // comes after all that the process says
	lines := make(chan string)
	go func() {
		defer close(lines)
		buf := make([]byte, 128)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				return
			}
			if string(buf[:n]) == end {
				return
			}
			lines <- string(buf[:n])
		}
	}()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	var j journal
	go func() {
		done <- lifecycle.Run(ctx, quiet(), j.part("a"))
		_, _ = conn.WriteToUnix([]byte(end), &net.UnixAddr{Name: path, Net: "unixgram"})
	}()
	var got []string
	for line := range lines {
		if len(got) == 0 || got[len(got)-1] != line {
			got = append(got, line)
		}
		if line == "WATCHDOG=1" {
			cancel()
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	// The watchdog goes on while the parts stop.
	if diff := cmp.Diff([]string{"READY=1", "WATCHDOG=1", "STOPPING=1", "WATCHDOG=1"}, got); diff != "" {
		t.Error(diff)
	}
}
