// Package plugin runs CNI plugins for the CNI library: a bounded number at a time, in a process
// group that is killed as a whole a moment after the time is up, with the trace context in the
// environment as OpenTelemetry describes it. No plugin outlives this process.
package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"go.opentelemetry.io/otel/propagation"
	"golang.org/x/sync/semaphore"

	"github.com/crisp-cri/crisp/services/internal/brief"
	"github.com/crisp-cri/crisp/services/internal/pause"
)

const (
	// maxOutput bounds what is kept of a plugin's output.
	maxOutput = 4 << 20
	// endGrace is how long a plugin whose result nobody wants any more may go on: one that is
	// killed between two steps can leave what its DEL does not find, such as an address file
	// without the name of its holder.
	endGrace = time.Second
	// pipeGrace is how long descendants of an ended plugin may keep its output open; endGrace is
	// part of it.
	pipeGrace = 2 * time.Second
	// busyTries and busyPause bound the wait for a plugin's file that is being written.
	busyTries = 10
	busyPause = 200 * time.Millisecond
)

// Runner runs plugins. Those that attach wait for each other only, so that some that hang while
// they detach keep no new pod from coming. It is safe for concurrent use.
type Runner struct {
	version.PluginDecoder

	attaching, others *semaphore.Weighted
	log               *slog.Logger
}

var _ invoke.Exec = (*Runner)(nil)

// New returns a runner. parallel bounds how many plugins attach at the same time, and how many
// do something else; 0 means no bound.
func New(parallel int64, log *slog.Logger) *Runner {
	if parallel <= 0 {
		parallel = math.MaxInt64
	}
	return &Runner{attaching: semaphore.NewWeighted(parallel), others: semaphore.NewWeighted(parallel), log: log}
}

// FindInPath implements the CNI library's interface.
func (*Runner) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

// ExecPlugin implements the CNI library's interface.
func (e *Runner) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	running := e.others
	if slices.Contains(environ, "CNI_COMMAND=ADD") {
		running = e.attaching
	}
	if err := running.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("wait for other plugins to end: %w", err)
	}
	defer running.Release(1)
	environ = environment(ctx, environ)
	var stdout, stderr limited
	var err error
	for range busyTries {
		stdout, stderr = limited{}, limited{}
		err = run(ctx, path, environ, bytes.NewReader(stdin), &stdout, &stderr)
		if !errors.Is(err, syscall.ETXTBSY) || !pause.For(ctx, busyPause) {
			break
		}
	}
	if stderr.Len() > 0 {
		e.log.DebugContext(ctx, "network plugin wrote to its standard error",
			slog.String("plugin", filepath.Base(path)), slog.String("output", brief.Text(stderr.String())))
	}
	if err != nil {
		return nil, pluginError(err, stdout.Bytes(), stderr.String())
	}
	return stdout.Bytes(), nil
}

// run runs a plugin, which does not outlive this process: an ADD that went on beside the DEL
// of the next process would hold an address for ever.
func run(ctx context.Context, path string, environ []string, stdin *bytes.Reader, stdout, stderr *limited) error {
	// The kernel takes the end of the thread that starts a process for its parent's.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, path)
	cmd.Env = environ
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	kill := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var later *time.Timer
	cmd.Cancel = func() error {
		later = time.AfterFunc(endGrace, kill)
		return nil
	}
	cmd.WaitDelay = pipeGrace
	err := cmd.Run()
	if later != nil && later.Stop() {
		kill() // what a plugin that has ended by itself left behind
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil // it ended well; only something that it left behind holds the output
	}
	return err
}

// pluginError is the error that a plugin printed, or what is known without one.
func pluginError(err error, stdout []byte, stderr string) error {
	var printed types.Error
	if json.Unmarshal(stdout, &printed) == nil && printed.Msg != "" {
		printed.Msg, printed.Details = brief.Text(printed.Msg), brief.Text(printed.Details)
		return &printed
	}
	if text := strings.TrimSpace(stderr); text != "" {
		return fmt.Errorf("plugin: %w: %s", err, brief.Text(text))
	}
	return fmt.Errorf("plugin: %w", err)
}

// environment adds the trace context and takes out what is meant for the daemon alone.
func environment(ctx context.Context, environ []string) []string {
	environ = slices.DeleteFunc(slices.Clone(environ), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return name == "NOTIFY_SOCKET" || name == "WATCHDOG_PID" || name == "WATCHDOG_USEC" || strings.HasPrefix(name, "LISTEN_")
	})
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	for _, key := range carrier.Keys() {
		environ = append(environ, strings.ToUpper(key)+"="+carrier.Get(key))
	}
	return environ
}

// limited keeps the first bytes that are written to it and drops the rest.
type limited struct {
	bytes.Buffer
}

func (l *limited) Write(p []byte) (int, error) {
	if room := maxOutput - l.Len(); room > 0 {
		l.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}
