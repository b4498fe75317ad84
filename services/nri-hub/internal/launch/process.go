package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	nrinet "github.com/containerd/nri/pkg/net"

	"github.com/crisp-cri/crisp/services/internal/pause"
)

// supervise runs the plugin again and again until ctx ends.
func (l *Launcher) supervise(ctx context.Context, f file) {
	delay := l.cfg.MinBackoff
	for ctx.Err() == nil {
		begin := time.Now()
		err := l.runOnce(ctx, f)
		if ctx.Err() != nil {
			return
		}
		if time.Since(begin) > l.cfg.MaxBackoff {
			delay = l.cfg.MinBackoff
		}
		l.log.WarnContext(ctx, "plugin ended and will be started again", slog.String("plugin", f.index+"-"+f.name),
			slog.Duration("pause", delay), slog.Any("error", err))
		pause.For(ctx, delay)
		delay = min(2*delay, l.cfg.MaxBackoff)
	}
}

// runOnce runs the plugin's process until it ends or ctx ends. The process never
// outlives the call.
func (l *Launcher) runOnce(ctx context.Context, f file) error {
	config, err := l.configuration(f)
	if err != nil {
		return err
	}
	if isWasm(f.path) {
		return l.server.ServeWasm(ctx, Plugin{Index: f.index, Name: f.name, Path: f.path, Config: config})
	}
	pair, err := nrinet.NewSocketPair()
	if err != nil {
		return err
	}
	defer pair.Close()
	output := &lines{log: l.log.With(slog.String("plugin", f.index+"-"+f.name))}
	defer output.flush()
	cmd := exec.Command(f.path) //nolint:noctx // it is ended in steps, not by a context
	cmd.Env = []string{
		nri.PluginNameEnvVar + "=" + f.name,
		nri.PluginIdxEnvVar + "=" + f.index,
		nri.PluginSocketEnvVar + "=3",
	}
	var extra Extra
	if l.cfg.Extra != nil {
		extra = l.cfg.Extra(f.index, f.name)
	}
	for _, k := range slices.Sorted(maps.Keys(extra.Env)) {
		cmd.Env = append(cmd.Env, k+"="+extra.Env[k])
	}
	cmd.ExtraFiles = []*os.File{pair.PeerFile()}
	cmd.Stdout, cmd.Stderr = output, output
	cmd.Dir = "/"
	// Its own process group, so that a signal for the hub's terminal is not its signal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// Whoever inherited the output must not keep us from noticing the end.
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start plugin %q: %w", f.path, err)
	}
	pair.PeerClose()
	exited := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { exited <- cmd.Wait() })

	served := make(chan error, 1)
	sctx, disconnect := context.WithCancel(ctx)
	defer disconnect()
	conn, err := pair.LocalConn()
	if err == nil {
		err = limit(cmd.Process.Pid, extra.Rlimits)
	}
	if err != nil {
		return errors.Join(err, l.terminate(ctx, cmd.Process, exited))
	}
	p := Plugin{Index: f.index, Name: f.name, PID: int32(cmd.Process.Pid), Path: f.path, Config: config}
	wg.Go(func() { served <- l.server.ServeLaunched(sctx, conn, p) })
	select {
	case err = <-exited:
		// The connection ends with the process, unless a child holds it.
		disconnect()
		return errors.Join(err, <-served)
	case err = <-served:
		// Disconnected, by the plugin, by us or because ctx has ended.
		return errors.Join(err, l.terminate(ctx, cmd.Process, exited))
	}
}

// isWasm reports whether the file begins like a WebAssembly module.
func isWasm(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false // its start says why
	}
	defer f.Close()
	var head [8]byte
	_, err = io.ReadFull(f, head[:])
	return err == nil && string(head[:]) == "\x00asm\x01\x00\x00\x00"
}

// terminate ends the process, gently first, and waits for its end.
func (l *Launcher) terminate(ctx context.Context, p *os.Process, exited <-chan error) error {
	timer := time.NewTimer(l.cfg.StopTimeout)
	defer timer.Stop()
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		l.log.WarnContext(ctx, "plugin process not signalled", slog.Int("pid", p.Pid), slog.Any("error", err))
	}
	select {
	case err := <-exited:
		return err
	case <-timer.C:
	}
	l.log.WarnContext(ctx, "plugin process killed because it did not end", slog.Int("pid", p.Pid))
	if err := syscall.Kill(-p.Pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		l.log.WarnContext(ctx, "plugin process not killed", slog.Int("pid", p.Pid), slog.Any("error", err))
	}
	return <-exited
}

// maxLine bounds a line of a plugin's output in the log.
const maxLine = 8 << 10

// lines writes a plugin's output to the log, line by line.
type lines struct {
	log *slog.Logger

	// mu guards buf.
	mu  sync.Mutex
	buf []byte
}

// Write never fails: the output is for the log alone.
func (w *lines) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = append(w.buf, p...)
	for {
		i := bytes.IndexByte(w.buf, '\n')
		if i < 0 && len(w.buf) < maxLine {
			return len(p), nil
		}
		next := i + 1
		if i < 0 || i > maxLine {
			i, next = maxLine, maxLine
		}
		w.emit(w.buf[:i])
		w.buf = w.buf[next:]
	}
}

func (w *lines) flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.emit(w.buf)
	w.buf = nil
}

func (w *lines) emit(line []byte) {
	if line = bytes.TrimRight(line, "\r"); len(line) > 0 {
		w.log.Info("plugin output", slog.String("line", string(line)))
	}
}
