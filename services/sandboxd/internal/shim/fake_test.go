package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/command"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/procs"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// patient are time limits that only a shim that does not answer at all meets.
func patient() Timeouts {
	const p = testkit.Patience
	return Timeouts{Start: p, Connect: p, Load: p, Cleanup: p, Shutdown: 2 * time.Second}
}

// shortConnect is for shims that cannot be connected to, which is tried as long as it may take.
func shortConnect(l *Timeouts) { l.Connect = time.Second }

func newManager(t *testing.T, dir string, change ...func(*Timeouts)) (*Manager, *testkit.Buffer) {
	t.Helper()
	log := &testkit.Buffer{}
	limits := patient()
	for _, c := range change {
		c(&limits)
	}
	m, err := New(t.Context(), Config{
		Dir:          filepath.Join(dir, "shims"),
		SocketDir:    filepath.Join(dir, "s"),
		EventsSocket: filepath.Join(dir, "events.sock"),
		Timeouts:     limits,
	}, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return m, log
}

func startFake(t *testing.T, m *Manager, h pod.Handler) (*Instance, error) {
	t.Helper()
	i, err := m.Create(t.Context(), Spec{SandboxID: shimtest.ID(), Handler: h, Config: []byte("{}")})
	if err != nil {
		return nil, err
	}
	return i, i.Start(t.Context())
}

func TestBadShims(t *testing.T) {
	dir := shimtest.Dir(t)
	notExecutable := filepath.Join(dir, "not-executable")
	if err := os.WriteFile(notExecutable, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	notBinary := filepath.Join(dir, "not-binary")
	if err := os.WriteFile(notBinary, []byte("no program"), 0o700); err != nil {
		t.Fatal(err)
	}
	m, _ := newManager(t, dir)
	for _, tc := range []struct {
		name    string
		handler pod.Handler
		is      func(error) bool
		says    string
		limits  func(*Timeouts)
	}{
		{"missing", pod.Handler{RuntimeType: "x.y.v1", ShimPath: filepath.Join(dir, "missing")}, errdefs.IsFailedPrecondition, "no such file", nil},
		{"not in path", pod.Handler{RuntimeType: "io.containerd.nowhere.v1"}, errdefs.IsFailedPrecondition, "containerd-shim-nowhere-v1", nil},
		{"bad type", pod.Handler{RuntimeType: "nowhere"}, errdefs.IsInvalidArgument, "nowhere", nil},
		{"not executable", pod.Handler{RuntimeType: "x.y.v1", ShimPath: notExecutable}, errdefs.IsFailedPrecondition, "permission denied", nil},
		{"not a binary", pod.Handler{RuntimeType: "x.y.v1", ShimPath: notBinary}, errdefs.IsFailedPrecondition, "exec format", nil},
		{"exit 1", shimtest.Fake(t, dir, "exit1", ""), errdefs.IsInternal, "no hypervisor found", nil},
		{"garbage", shimtest.Fake(t, dir, "garbage", ""), errdefs.IsInternal, "too long", nil},
		{"empty", shimtest.Fake(t, dir, "empty", ""), errdefs.IsInternal, "no address", nil},
		{"hangs", shimtest.Fake(t, dir, "hang", ""), errdefs.IsUnavailable, "no answer within", func(l *Timeouts) { l.Start = time.Second }},
		{"nobody listens", shimtest.Fake(t, dir, "nobody", ""), errdefs.IsUnavailable, "no connection within", shortConnect},
		{"mute", shimtest.Fake(t, dir, "mute", ""), errdefs.IsUnavailable, "no connection within", shortConnect},
		{"dies before it answers", shimtest.Fake(t, dir, "killed", ""), errdefs.IsInternal, "killed", nil},
		{"address of another kind", shimtest.Fake(t, dir, "vsock", ""), errdefs.IsNotImplemented, "vsock", nil},
		{"address that is a file", shimtest.Fake(t, dir, "file", ""), errdefs.IsUnavailable, "nobody listens", shortConnect},
		{"address of something else", shimtest.Fake(t, dir, "liar", ""), errdefs.IsUnavailable, "fake.sock", shortConnect},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := m
			if tc.limits != nil {
				m, _ = newManager(t, dir, tc.limits)
			}
			began := time.Now()
			i, err := startFake(t, m, tc.handler)
			if !tc.is(err) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("error %v", err)
			}
			if d := time.Since(began); d >= testkit.Patience {
				t.Errorf("took %s", d)
			}
			if i == nil {
				return
			}
			if _, err := m.Get(i.ID()); !errdefs.IsNotFound(err) {
				t.Errorf("still known: %v", err)
			}
			if err := m.Shutdown(t.Context(), i.ID()); err != nil {
				t.Errorf("shutdown: %v", err)
			}
		})
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "shims")); len(left) > 0 {
		t.Errorf("bundles left: %v", left)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if left, _ := os.ReadDir(filepath.Join(dir, "s")); len(left) > 0 {
			return fmt.Errorf("sockets left: %v", left)
		}
		return nil
	})
	shimtest.NothingLeft(t, dir)
}

// processesOf lists the processes of a program.
func processesOf(binary string) []string {
	links, _ := filepath.Glob("/proc/[0-9]*/exe")
	var out []string
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil && target == binary {
			out = append(out, l)
		}
	}
	return out
}

func TestAnswersOfAllKinds(t *testing.T) {
	dir := shimtest.Dir(t)
	m, log := newManager(t, dir)
	for mode, version := range map[string]int{"plain": 2, "json": 3, "proto": 3, "downgrade": 2, "grpc": 3} {
		t.Run(mode, func(t *testing.T) {
			i, err := startFake(t, m, shimtest.Fake(t, dir, mode, ""))
			if err != nil {
				t.Fatal(err)
			}
			st := i.Status()
			if !st.Alive || st.Pid == 0 || st.Endpoint.Version != version {
				t.Errorf("status %+v, want version %d", st, version)
			}
			if err := m.Shutdown(t.Context(), i.ID()); err != nil {
				t.Error(err)
			}
			select {
			case <-i.Ended():
			default:
				t.Error("not ended")
			}
		})
	}
	if !strings.Contains(log.String(), "fake shim serves") {
		t.Error("log of the shim is not in ours")
	}
	if procs := processesOf(filepath.Join(dir, "fakeshim")); len(procs) > 0 {
		t.Errorf("processes left: %v", procs)
	}
}

func TestShimThatDies(t *testing.T) {
	dir := shimtest.Dir(t)
	m, _ := newManager(t, dir)
	i, err := startFake(t, m, shimtest.Fake(t, dir, "proto", ""))
	if err != nil {
		t.Fatal(err)
	}
	if err := killPID(int(i.Status().Pid)); err != nil {
		t.Fatal(err)
	}
	testkit.Receive(t, i.Ended())
	if st := i.Status(); st.Alive || !st.Ended || st.DiedAt.IsZero() {
		t.Errorf("status %+v", st)
	}
	if err := m.Shutdown(t.Context(), i.ID()); err != nil {
		t.Error(err)
	}
}

func TestReloadStates(t *testing.T) {
	dir := shimtest.Dir(t)
	m, _ := newManager(t, dir)
	good, err := startFake(t, m, shimtest.Fake(t, dir, "proto", "shim"))
	if err != nil {
		t.Fatal(err)
	}
	create := func() string {
		i, err := m.Create(t.Context(), Spec{SandboxID: shimtest.ID(), Handler: shimtest.Fake(t, dir, "proto", ""), Config: []byte("{}")})
		if err != nil {
			t.Fatal(err)
		}
		return i.Bundle().Dir()
	}
	write := func(dir, name, content string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	neverStarted := create()
	cut := create()
	write(cut, "bootstrap.json", `{"version":3,"addr`)
	stale := create()
	write(stale, "bootstrap.json", `{"version":3,"address":"unix://`+filepath.Join(dir, "s", "stale")+`","protocol":"ttrpc"}`)
	otherBoot := create()
	write(otherBoot, "sandbox.json", `{"boot_id":"another"}`)
	noMeta := create()
	write(noMeta, "sandbox.json", `{`)
	if err := os.Mkdir(filepath.Join(dir, "shims", ".new-rest"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}

	m2, _ := newManager(t, dir)
	loaded, err := m2.Reload(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{
		good.ID(): true, filepath.Base(neverStarted): false, filepath.Base(cut): false, filepath.Base(stale): false,
		filepath.Base(otherBoot): false, filepath.Base(noMeta): false,
	}
	if len(loaded) != len(want) {
		t.Errorf("loaded %+v", loaded)
	}
	for _, l := range loaded {
		if alive, ok := want[l.SandboxID]; !ok || alive != l.Alive || alive != (l.Err == nil) {
			t.Errorf("loaded %+v, want alive=%v", l, alive)
		}
		i, err := m2.Get(l.SandboxID)
		if err != nil {
			t.Error(err)
			continue
		}
		if l.Alive && i.Meta().Sandboxer != "shim" {
			t.Errorf("meta %+v", i.Meta())
		}
		if err := m2.Shutdown(t.Context(), l.SandboxID); err != nil {
			t.Error(err)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "shims")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// What a bundle has lost of its shim's description comes from elsewhere: a shim that lives is
// used again, and one that is dead is cleaned up after by its own program.
func TestReloadWithoutDescription(t *testing.T) {
	dir := shimtest.Dir(t)
	m, _ := newManager(t, dir)
	lives, other := shimtest.Fake(t, dir, "proto", "shim"), shimtest.Fake(t, dir, "json", "")
	byID, want := map[string]pod.Handler{}, map[string]string{}
	begin := func(h, known pod.Handler, then string) {
		i, err := startFake(t, m, h)
		if err != nil {
			t.Fatal(err)
		}
		byID[i.ID()], want[i.ID()] = known, then
		if err := os.Truncate(filepath.Join(i.Bundle().Dir(), "sandbox.json"), 3); err != nil {
			t.Fatal(err)
		}
		if then == "dead" {
			if err := procs.KillIn(t.Context(), i.Bundle().Dir()); err != nil {
				t.Fatal(err)
			}
		}
	}
	begin(lives, lives, "alive")
	begin(lives, lives, "dead")
	begin(lives, pod.Handler{}, "unknown")
	notExecuted := other
	notExecuted.ShimPath = "/bin/sh" // the configuration has changed
	begin(other, notExecuted, "another shim")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	m2, _ := newManager(t, dir)
	loaded, err := m2.Reload(t.Context(), func(id string) (pod.Handler, string, bool) {
		return byID[id], m.bootID, byID[id].Name != ""
	})
	if err != nil || len(loaded) != len(want) {
		t.Fatalf("loaded %+v, %v", loaded, err)
	}
	for _, l := range loaded {
		i, err := m2.Get(l.SandboxID)
		if err != nil {
			t.Fatal(err)
		}
		expected := want[l.SandboxID]
		restored := expected == "alive" || expected == "dead"
		if l.Alive != (expected == "alive") || (l.Err == nil) != l.Alive {
			t.Errorf("%s: loaded %+v", expected, l)
		}
		if restored != (i.Meta().RuntimeType == lives.RuntimeType) || restored && (i.Meta().ShimPath != lives.ShimPath || i.Meta().BootID != m.bootID) {
			t.Errorf("%s: description %+v", expected, i.Meta())
		}
		if saved, err := i.Bundle().Meta(); (err == nil) != restored || restored && saved != i.Meta() {
			t.Errorf("%s: saved %+v, %v", expected, saved, err)
		}
		if err := m2.Shutdown(t.Context(), l.SandboxID); err != nil {
			t.Error(err)
		}
	}
	shimtest.NothingLeft(t, dir)
}

// A shim that accepts connections and never answers delays only itself, and is used again
// when its process is replaced by nothing: it stays known until it is shut down.
func TestReloadMuteShim(t *testing.T) {
	dir := shimtest.Dir(t)
	m, _ := newManager(t, dir)
	good, err := startFake(t, m, shimtest.Fake(t, dir, "proto", ""))
	if err != nil {
		t.Fatal(err)
	}
	muteHandler := shimtest.Fake(t, dir, "mute", "")
	i, err := m.Create(t.Context(), Spec{SandboxID: shimtest.ID(), Handler: muteHandler, Config: []byte("{}")})
	if err != nil {
		t.Fatal(err)
	}
	own := command.Shim{Path: muteHandler.ShimPath, ID: i.ID(), Dir: i.Bundle().Dir()}
	e, err := m.commands.Start(t.Context(), own, nil, m.cfg.Timeouts.Start)
	if err != nil {
		t.Fatal(err)
	}
	if err := command.SaveEndpoint(i.Bundle().Dir(), e); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	m2, _ := newManager(t, dir, func(l *Timeouts) { l.Load = 3 * time.Second })
	began := time.Now()
	loaded, err := m2.Reload(t.Context(), nil)
	if err != nil || len(loaded) != 2 {
		t.Fatalf("%+v, %v", loaded, err)
	}
	if d := time.Since(began); d > 20*time.Second {
		t.Errorf("took %s", d)
	}
	for _, l := range loaded {
		if l.Err != nil || l.Alive != (l.SandboxID == good.ID()) {
			t.Errorf("loaded %+v", l)
		}
	}
	mute, err := m2.Get(i.ID())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := mute.Settle(ctx); err == nil {
		t.Error("settled")
	}
	for _, l := range loaded {
		if err := m2.Shutdown(t.Context(), l.SandboxID); err != nil {
			t.Error(err)
		}
	}
	if procs := processesOf(filepath.Join(dir, "fakeshim")); len(procs) > 0 {
		t.Errorf("processes left: %v", procs)
	}
}

func TestShutdownDuringStart(t *testing.T) {
	dir := shimtest.Dir(t)
	m, _ := newManager(t, dir)
	i, err := m.Create(t.Context(), Spec{SandboxID: shimtest.ID(), Handler: shimtest.Fake(t, dir, "hang", ""), Config: []byte("{}")})
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan error, 1)
	go func() { started <- i.Start(t.Context()) }()
	testkit.Eventually(t, testkit.Patience, func() error {
		if len(processesOf(filepath.Join(dir, "fakeshim"))) == 0 {
			return errors.New("the shim does not run yet")
		}
		return nil
	})
	if err := m.Shutdown(t.Context(), i.ID()); err != nil {
		t.Error(err)
	}
	if err := <-started; !errdefs.IsAborted(err) {
		t.Errorf("start: %v", err)
	}
	if procs := processesOf(filepath.Join(dir, "fakeshim")); len(procs) > 0 {
		t.Errorf("processes left: %v", procs)
	}
}
