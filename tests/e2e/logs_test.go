//go:build integration

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// writers is a container whose two streams get numbered lines as fast as it can.
type writers struct {
	s      *system
	id     string
	log    string
	volume string
	out    testenv.Numbered
	errs   testenv.Numbered
}

func (s *system) writers(name string) *writers {
	s.t.Helper()
	s.pull(busybox)
	w := &writers{s: s, volume: s.t.TempDir()}
	pod, config := s.pod(name)
	w.out, w.errs = testenv.Numbered{Name: "out", Folder: "/volume", Burst: 500, Length: 100}, testenv.Numbered{Name: "err", Folder: "/volume", Burst: 500, Length: 100}
	c := containerConfig("writers", fmt.Sprintf("(%s) >&2 & %s; wait", w.errs.Script(), w.out.Script()))
	c.Mounts = []*criv1.Mount{{HostPath: w.volume, ContainerPath: "/volume"}}
	w.id = s.container(pod, config, c)
	w.log = s.status(w.id).GetLogPath()
	w.grows(w.log)
	return w
}

// grows waits until a log has some megabytes more.
func (w *writers) grows(path string) {
	w.s.t.Helper()
	before := size(path)
	eventually(w.s.t, "the log grows", func() error {
		if now := size(path); now < before+2<<20 {
			return fmt.Errorf("from %d to %d bytes", before, now)
		}
		return nil
	})
}

func size(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// finish ends the writers and checks their logs.
func (w *writers) finish(paths ...string) {
	t := w.s.t
	t.Helper()
	must(t, os.WriteFile(filepath.Join(w.volume, "stop"), nil, 0o644))
	if st := w.s.waitExit(w.id); st.GetExitCode() != 0 {
		t.Errorf("exit code %d: %s", st.GetExitCode(), st.GetMessage())
	}
	for stream, writer := range map[string]testenv.Numbered{"stdout": w.out, "stderr": w.errs} {
		text, err := os.ReadFile(filepath.Join(w.volume, writer.Name+".lines"))
		must(t, err)
		lines, err := strconv.Atoi(strings.TrimSpace(string(text)))
		must(t, err)
		if err := writer.Check(stream, lines, paths...); err != nil {
			t.Errorf("%s: %v", stream, err)
		}
		t.Logf("%s: %d lines in %d files", stream, lines, len(paths))
	}
}

// A log that is rotated while a container writes as fast as it can loses no line, doubles
// none, and after the reopening nothing more goes into the old file.
func TestRotationLosesNothing(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		w := start(t, testenv.Setup{Handler: handler}).writers("rotated")
		var paths []string
		sizes := map[string]int64{}
		for n := range 10 {
			old := fmt.Sprintf("%s.%d", w.log, n)
			must(t, os.Rename(w.log, old))
			time.Sleep(20 * time.Millisecond)
			_, err := w.s.CRI.ReopenContainerLog(t.Context(), &criv1.ReopenContainerLogRequest{ContainerId: w.id})
			must(t, err)
			sizes[old] = size(old)
			paths = append(paths, old)
			w.grows(w.log)
		}
		w.finish(append(paths, w.log)...)
		for path, before := range sizes {
			if now := size(path); now != before {
				t.Errorf("%s had %d bytes when the log was reopened and has %d", path, before, now)
			}
		}
		_, err := w.s.CRI.ReopenContainerLog(t.Context(), &criv1.ReopenContainerLogRequest{ContainerId: w.id})
		if err == nil {
			t.Error("the log of an ended container was reopened")
		}
	})
}

// Stopping sandboxd in good order and starting it again costs a container that writes no
// line, whoever writes its log, nor the begin of a line that is not finished at that time.
func TestLogOverAnOrderlyRestart(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		w := s.writers("written")
		volume := t.TempDir()
		pod, config := s.pod("halves")
		// Nearly always there is half a line that was read and cannot be written yet.
		c := containerConfig("halves", `n=0; while [ ! -e /volume/stop ]; do printf "begin $n"; sleep 0.1; echo " end"; n=$((n+1)); done`)
		c.Mounts = []*criv1.Mount{{HostPath: volume, ContainerPath: "/volume"}}
		halves := s.container(pod, config, c)
		for range 3 {
			must(t, s.Stop(t.Context(), testenv.Sandboxd))
			must(t, s.Run(testenv.Sandboxd))
			must(t, s.WaitReady(t.Context()))
			w.grows(w.log)
		}
		w.finish(w.log)
		must(t, os.WriteFile(filepath.Join(volume, "stop"), nil, 0o644))
		s.waitExit(halves)
		wholeLines(t, s.status(halves).GetLogPath())
	})
}

// wholeLines checks that a log holds "begin N end" with ascending numbers, in whatever parts.
func wholeLines(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	content := ""
	for record := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSuffix(record, "\n"), " ", 4)
		if len(fields) != 4 {
			t.Fatalf("record %q", record)
		}
		content += fields[3]
		if fields[2] == "F" {
			content += "\n"
		}
	}
	n := 0
	for line := range strings.Lines(content) {
		if want := fmt.Sprintf("begin %d end\n", n); line != want {
			t.Fatalf("line %q, want %q", line, want)
		}
		n++
	}
	if n < 5 {
		t.Errorf("%d lines are too few", n)
	}
}

// A stop is polite first: who listens ends in its own way, who does not is killed, and
// nobody of it remains.
func TestStopIsPoliteFirst(t *testing.T) {
	testenv.EachHandler(t, func(t *testing.T, handler string) {
		s := start(t, testenv.Setup{Handler: handler})
		s.pull(busybox)
		pod, config := s.pod("stopped")
		polite := s.container(pod, config, containerConfig("polite", "trap 'exit 7' TERM; echo ready; while true; do sleep 0.1; done"))
		deaf := s.container(pod, config, containerConfig("deaf", "trap '' TERM; sleep 1000 & echo ready; while true; do sleep 0.1; done"))
		for id, code := range map[string]int32{polite: 7, deaf: 137} {
			eventually(t, "the trap is set", func() error {
				text, err := os.ReadFile(s.status(id).GetLogPath())
				if err == nil && !strings.Contains(string(text), "ready") {
					err = errors.New("not yet")
				}
				return err
			})
			_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: id, Timeout: 2})
			must(t, err)
			if got := s.waitExit(id).GetExitCode(); got != code {
				t.Errorf("exit code %d, want %d", got, code)
			}
		}
	})
}
