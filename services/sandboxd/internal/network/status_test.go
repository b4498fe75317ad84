package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

// list11 configures a network of CNI 1.1 with more keys, such as "disableGC".
func (b *bench) list11(file, more string, plugins ...string) {
	var out []string
	for _, p := range plugins {
		out = append(out, fmt.Sprintf(`{"type":%q}`, p))
	}
	b.put(file, fmt.Sprintf(`{"cniVersion":"1.1.0","name":%q%s,"plugins":[%s]}`, strings.TrimSuffix(file, ".conflist"), more, strings.Join(out, ",")))
	b.reload()
}

func TestStatusOfPlugins(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("good", gives)
	b.plugin("absent-minded", `[ $CNI_COMMAND = STATUS ] || { `+gives+`; }; echo '{"cniVersion":"1.1.0","code":4,"msg":"unknown CNI_COMMAND: STATUS"}'; exit 1`)
	b.plugin("moody", `[ -e `+b.dir+`/ill -a $CNI_COMMAND = STATUS ] || { `+gives+`; }; echo '{"cniVersion":"1.1.0","code":50,"msg":"no agent","details":"its socket is gone"}'; exit 1`)
	b.list11("10-a.conflist", "", "good", "absent-minded", "moody")

	if err := b.Ready(); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), `network "10-a"`) {
		t.Errorf("nobody was asked, and the network is ready: %v", err)
	}
	b.refresh(t.Context())
	if err := b.Ready(); err != nil {
		t.Error(err)
	}
	b.write("ill", "", 0o644)
	b.refresh(t.Context())
	for range 2 {
		err := b.Ready()
		if !errors.Is(err, errdefs.ErrUnavailable) {
			t.Fatalf("ready: %v", err)
		}
		for _, want := range []string{`network "10-a"`, `plugin "moody"`, "no agent", "its socket is gone"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is not in %v", want, err)
			}
		}
		b.reload() // reading the same configuration again makes no plugin well
	}
	if _, err := b.Attach(t.Context(), request()); err != nil {
		t.Errorf("the status is for kubelet to heed: %v", err)
	}
}

func TestStatusOfPluginThatHangs(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Timeout = time.Second })
	b.plugin("hangs", `sleep 1000`)
	b.list11("10-a.conflist", "", "hangs")
	start := time.Now()
	b.refresh(t.Context())
	if err := b.Ready(); err == nil || !strings.Contains(err.Error(), `plugin "hangs": no answer in time`) {
		t.Errorf("ready: %v", err)
	}
	if d := time.Since(start); d > testkit.Patience {
		t.Errorf("took %s", d)
	}
	b.list("10-a.conflist", "hangs") // of a version without STATUS
	if err := b.Ready(); err != nil {
		t.Error(err)
	}
}

// While the plugins are asked again, what they said before holds.
func TestStatusDoesNotFlap(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("ill", `[ ! -e `+b.dir+`/slow ] || { touch `+b.dir+`/asked; while [ ! -e `+b.dir+`/go ]; do sleep 0.05; done; }; `+fails)
	b.list11("10-a.conflist", "", "ill")
	b.refresh(t.Context())
	b.write("slow", "", 0o644)
	done := make(chan struct{})
	go func() { defer close(done); b.refresh(t.Context()) }()
	b.eventually("asked", func() bool { return b.exists("asked") })
	if err := b.Ready(); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("ready: %v", err)
	}
	b.write("go", "", 0o644)
	<-done
}

// With a grace a plugin that was well may be ill for a while; one that never was has none.
func TestStatusGrace(t *testing.T) {
	t.Parallel()
	for grace, wantReady := range map[time.Duration]bool{time.Hour: true, time.Nanosecond: false} {
		b := newBench(t, func(c *Config) { c.StatusGrace = grace })
		b.plugin("moody", `[ -e `+b.dir+`/ill -a $CNI_COMMAND = STATUS ] || { `+gives+`; }; `+fails)
		b.write("ill", "", 0o644)
		b.list11("10-a.conflist", "", "moody")
		b.refresh(t.Context())
		if b.Ready() == nil {
			t.Errorf("grace %v: ready by a plugin that was never well", grace)
		}
		if err := os.Remove(filepath.Join(b.dir, "ill")); err != nil {
			t.Fatal(err)
		}
		b.refresh(t.Context())
		if err := b.Ready(); err != nil {
			t.Error(err)
		}
		b.write("ill", "", 0o644)
		b.refresh(t.Context())
		if err := b.Ready(); (err == nil) != wantReady {
			t.Errorf("grace %v: %v", grace, err)
		}
		b.list11("10-a.conflist", `,"disableGC":true`, "moody")
		b.refresh(t.Context())
		if b.Ready() == nil {
			t.Errorf("grace %v: another configuration is ready by what the one before was", grace)
		}
	}
}

func TestStatusIsAskedAgainSoonWhileItIsBad(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("ill", `[ -e `+b.dir+`/well ] || { `+fails+`; }`)
	b.list11("10-a.conflist", "", "ill")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	ready := make(chan struct{})
	go func() { done <- b.Run(ctx, func() { close(ready) }) }()
	<-ready
	b.eventually("asked", func() bool { return strings.Contains(fmt.Sprint(b.Ready()), "no room") })
	b.write("well", "", 0o644)
	b.eventually("ready", func() bool { return b.Ready() == nil }) // within 10 seconds
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
