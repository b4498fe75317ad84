package app

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/containerio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/client"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// streamsOf returns the streams of a node without pods, the folder of their FIFOs and that of
// their logs.
func streamsOf(t *testing.T) (s streams, fifos, logs string) {
	t.Helper()
	dir := shimtest.Dir(t)
	m, err := shim.New(t.Context(), shim.Config{
		Dir: filepath.Join(dir, "shims"), EventsSocket: filepath.Join(dir, "events.sock"),
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, i := range m.All() {
			if err := m.Shutdown(context.WithoutCancel(t.Context()), i.ID()); err != nil {
				t.Error(err)
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	fifos, logs = filepath.Join(dir, "io"), filepath.Join(dir, "logs")
	return newStreams(m, containerio.New(containerio.Config{Dir: fifos}, slog.New(slog.DiscardHandler)), 0), fifos, logs
}

// podWith makes a pod whose shim is of that type. It is not started.
func podWith(t *testing.T, s streams, runtimeType string) *shim.Instance {
	t.Helper()
	i, err := s.shims.Create(t.Context(), shim.Spec{
		SandboxID: shimtest.ID(), Config: []byte("{}"), Handler: pod.Handler{RuntimeType: runtimeType, ShimPath: "/bin/false"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// Which streams a container has is decided by its pod's shim: one that writes logs itself is
// told where, and every other one, as an unknown one, gets FIFOs that are read here.
func TestStreamsFollowTheShim(t *testing.T) {
	s, fifos, logs := streamsOf(t)
	own, other := podWith(t, s, client.RuntimeType), podWith(t, s, "io.containerd.runc.v2")
	for _, tc := range []struct {
		name, sandbox string
		i             *shim.Instance
		writesLogs    bool
	}{
		{"our own shim", own.ID(), own, true},
		{"another shim", other.ID(), other, false},
		{"a pod that is not known", shimtest.ID(), nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			id := shimtest.ID()
			log := filepath.Join(logs, id)
			stdio, err := s.Open(t.Context(), id, port.IOSpec{SandboxID: tc.sandbox, LogPath: log, Stdin: true})
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasPrefix(stdio.Stdout, "crilog:") != tc.writesLogs || strings.HasPrefix(stdio.Stdout, fifos) == tc.writesLogs {
				t.Errorf("the output is %q", stdio.Stdout)
			}
			_, err = os.Stat(filepath.Join(fifos, id))
			if errors.Is(err, os.ErrNotExist) != tc.writesLogs {
				t.Errorf("FIFOs: %v", err)
			}
			if tc.i != nil {
				if _, err := tc.i.Bundle().CreateContainer(id, []byte("{}")); err != nil {
					t.Fatal(err)
				}
			}
			// The shim does not run: what asks it finds nobody, what is done here works.
			reopenErr := s.ReopenLog(t.Context(), id)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			attachErr := s.Attach(ctx, id, pod.Streams{Stdout: io.Discard})
			if tc.writesLogs {
				if !errdefs.IsUnavailable(reopenErr) || !errdefs.IsUnavailable(attachErr) {
					t.Errorf("reopen: %v, attach: %v", reopenErr, attachErr)
				}
				if err := s.Drain(t.Context(), id); err != nil {
					t.Errorf("a shim that is gone has no output left: %v", err)
				}
			} else if reopenErr != nil || !errors.Is(attachErr, context.DeadlineExceeded) {
				t.Errorf("reopen: %v, attach: %v", reopenErr, attachErr)
			}
			if err := s.Close(t.Context(), id); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(filepath.Join(fifos, id)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("FIFOs after the end: %v", err)
			}
		})
	}
}

// Execs have FIFOs whatever the shim.
func TestExecsHaveFIFOs(t *testing.T) {
	s, fifos, _ := streamsOf(t)
	for _, runtimeType := range []string{client.RuntimeType, "io.containerd.runc.v2"} {
		i, id := podWith(t, s, runtimeType), shimtest.ID()
		if _, err := i.Bundle().CreateContainer(id, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		x, err := s.OpenExec(t.Context(), id, "x", false, pod.Streams{Stdout: io.Discard})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(x.Stdio().Stdout, fifos) {
			t.Errorf("%s: the output is %q", runtimeType, x.Stdio().Stdout)
		}
		if err := errors.Join(x.Close(), s.Close(t.Context(), id)); err != nil {
			t.Error(err)
		}
	}
}
