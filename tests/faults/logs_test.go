//go:build integration

package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// A container that writes some 10 MB in a second while sandboxd is dead is not held up and
// loses nothing, nor does one that ends meanwhile. This is what our own shim is for: the
// stock one holds its containers up once a pipe is full.
func TestLogGoesOnWithoutSandboxd(t *testing.T) {
	s := start(t, testenv.Setup{Handler: testenv.HandlerCrisp})
	config := s.podConfig("writers")
	pod := s.pod(config, "")
	writes := testenv.Numbered{Name: "writer", Folder: "/volume", Burst: 1000, Length: 1000, Pause: "0.03"}
	writer := func(name string) (id, folder string) {
		folder = t.TempDir()
		c := script(name, writes.Script())
		c.Mounts = []*criv1.Mount{{HostPath: folder, ContainerPath: "/volume"}}
		return s.container(pod, config, c), folder
	}
	steady, steadyFolder := writer("steady")
	ending, endingFolder := writer("ending")
	logs := map[string]string{steady: s.status(steady).GetLogPath(), ending: s.status(ending).GetLogPath()}
	for _, path := range logs {
		eventually(t, patience, "the container writes", func() error {
			info, err := os.Stat(path)
			if err == nil && info.Size() < 5<<20 {
				err = fmt.Errorf("%d bytes so far", info.Size())
			}
			return err
		})
	}

	must(t, s.Kill(t.Context(), testenv.Sandboxd))
	dead := time.Duration(scaled(t, 6)) * time.Second
	must(t, os.WriteFile(filepath.Join(endingFolder, "stop"), nil, 0o644))
	first := logSize(t, logs[steady])
	before := first
	begun := time.Now()
	for time.Since(begun) < dead {
		time.Sleep(min(2*time.Second, dead))
		now := logSize(t, logs[steady])
		if now <= before {
			t.Errorf("the log stays at %d bytes after %s without sandboxd", now, time.Since(begun))
		}
		before = now
	}
	rate := float64(before-first) / 1e6 / time.Since(begun).Seconds()
	load, err := os.ReadFile("/proc/loadavg")
	must(t, err)
	t.Logf("%.1f MB/s of log in %s without sandboxd, load average %s", rate, dead, strings.TrimSpace(string(load)))
	if busy, err := strconv.ParseFloat(strings.Fields(string(load))[0], 64); rate < 10 && err == nil && busy < float64(runtime.NumCPU())+1 {
		t.Errorf("%.1f MB/s on a machine that has nothing else to do, want 10", rate)
	}
	must(t, s.Run(testenv.Sandboxd))
	must(t, s.WaitReady(t.Context()))
	time.Sleep(time.Second)
	must(t, os.WriteFile(filepath.Join(steadyFolder, "stop"), nil, 0o644))

	for id, folder := range map[string]string{steady: steadyFolder, ending: endingFolder} {
		name := s.status(id).GetMetadata().GetName()
		if st := s.waitExit(id, patience); st.GetExitCode() != 0 {
			t.Errorf("%s: exit code %d: %s", name, st.GetExitCode(), st.GetReason())
		}
		lines := int(number(t, filepath.Join(folder, "writer.lines")))
		if err := writes.Check("stdout", lines, logs[id]); err != nil {
			t.Errorf("%s, which wrote %d lines: %v", name, lines, err)
			continue
		}
		slowest := number(t, filepath.Join(folder, "writer.slowest"))
		if slowest > 5 {
			t.Errorf("%s: a write of a megabyte took %.1f s", name, slowest)
		}
		t.Logf("%s: %d lines of %d bytes in order, none lost; the slowest megabyte took %.2f s", name, lines, writes.Length, slowest)
	}
	must(t, s.removePod(pod))
}

func logSize(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return info.Size()
}

// number reads a file that holds a number.
func number(t *testing.T, path string) float64 {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	n, err := strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
	must(t, err)
	return n
}
