package containerio

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

var _ port.IO = (*IO)(nil)

func newIO(t *testing.T, cfg Config) *IO {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	return New(cfg, slog.New(slog.DiscardHandler))
}

// shimEnd opens a FIFO as the stock shim does: writing end first, then a reading one, so
// that the pipe outlives the other side.
func shimEnd(t *testing.T, path string) (w *os.File, closeBoth func()) {
	t.Helper()
	w, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	return w, func() {
		_ = w.Close()
		_ = r.Close()
	}
}

func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	t.Cleanup(cancel)
	return ctx
}

func readLog(t *testing.T, path string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return tags(t, data)
}

func TestLogOverRestart(t *testing.T) {
	dir := t.TempDir()
	logPath := filepath.Join(dir, "log")
	spec := port.IOSpec{LogPath: logPath}
	first := newIO(t, Config{Dir: dir})
	stdio, err := first.Open(t.Context(), "c", spec)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := first.Open(t.Context(), "c", spec); err != nil || again != stdio {
		t.Errorf("second open: %+v, %v", again, err)
	}
	out, closeOut := shimEnd(t, stdio.Stdout)
	_, closeErr := shimEnd(t, stdio.Stderr)
	fmt.Fprint(out, "one\ntw")
	eventually(t, func() bool { return len(readLog(t, logPath)) == 1 })
	if err := first.Stop(bounded(t)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(out, "o\nthree\n") // while nobody reads
	second := newIO(t, Config{Dir: dir})
	if again, err := second.Open(t.Context(), "c", spec); err != nil || again != stdio {
		t.Fatalf("open after restart: %+v, %v", again, err)
	}
	fmt.Fprint(out, "four")
	closeOut()
	closeErr()
	if err := second.Drain(bounded(t), "c"); err != nil {
		t.Fatal(err)
	}
	want := []string{"F:one", "P:tw", "F:o", "F:three", "P:four"}
	if diff := cmp.Diff(want, readLog(t, logPath)); diff != "" {
		t.Error(diff)
	}
	if err := second.Close(bounded(t), "c"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "c")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("fifos left: %v", err)
	}
	if err := second.Close(bounded(t), "c"); err != nil {
		t.Errorf("second close: %v", err)
	}
}

// A FIFO that is opened when its writers have gone ends by draining.
func TestDrainWithoutWriters(t *testing.T) {
	o := newIO(t, Config{})
	if _, err := o.Open(t.Context(), "c", port.IOSpec{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	c, err := o.get("c")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.wait(ctx); err == nil {
		t.Error("ended before it began")
	}
	if err := o.Drain(bounded(t), "c"); err != nil {
		t.Error(err)
	}
	if err := o.Close(bounded(t), "c"); err != nil {
		t.Error(err)
	}
	if err := o.Drain(bounded(t), "unknown"); err != nil {
		t.Error(err)
	}
}

func TestReopenLosesNothing(t *testing.T) {
	dir := t.TempDir()
	logPath := filepath.Join(dir, "log")
	o := newIO(t, Config{Dir: dir})
	stdio, err := o.Open(t.Context(), "c", port.IOSpec{LogPath: logPath, Terminal: true})
	if err != nil {
		t.Fatal(err)
	}
	if stdio.Stderr != "" || !stdio.Terminal {
		t.Errorf("stdio %+v", stdio)
	}
	out, closeOut := shimEnd(t, stdio.Stdout)
	const lines = 20000
	go func() {
		defer closeOut()
		for i := range lines {
			fmt.Fprintln(out, i)
		}
	}()
	var files []string
	for i := range 5 {
		time.Sleep(2 * time.Millisecond)
		moved := fmt.Sprintf("%s.%d", logPath, i)
		if err := os.Rename(logPath, moved); err != nil {
			t.Fatal(err)
		}
		files = append(files, moved)
		if err := o.ReopenLog(t.Context(), "c"); err != nil {
			if errdefs.IsFailedPrecondition(err) { // all is written
				if err := os.Rename(moved, logPath); err != nil {
					t.Fatal(err)
				}
				files = files[:len(files)-1]
				break
			}
			t.Fatal(err)
		}
	}
	if err := o.Drain(bounded(t), "c"); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range append(files, logPath) {
		for _, r := range readLog(t, f) {
			if r != fmt.Sprintf("F:%d", n) {
				t.Fatalf("record %q, want %d", r, n)
			}
			n++
		}
	}
	if n != lines {
		t.Errorf("%d of %d lines", n, lines)
	}
	if err := os.Remove(logPath); err != nil {
		t.Fatal(err)
	}
	if err := o.ReopenLog(t.Context(), "c"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("reopen after the end: %v", err)
	}
	if _, err := os.Stat(logPath); err == nil {
		t.Error("failed reopen made a file")
	}
	if err := o.Close(bounded(t), "c"); err != nil {
		t.Error(err)
	}
	if err := o.ReopenLog(t.Context(), "c"); !errdefs.IsNotFound(err) {
		t.Errorf("reopen of the unknown: %v", err)
	}
}

func TestUnsafeLogs(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	for path, make := range map[string]func(string) error{
		"link":                   func(p string) error { return os.Symlink(outside, p) },
		"fifo":                   func(p string) error { return unix.Mkfifo(p, 0o600) },
		"folder":                 func(p string) error { return os.Mkdir(p, 0o700) },
		"null\x00":               func(string) error { return nil },
		strings.Repeat("x", 300): func(string) error { return nil },
	} {
		path = filepath.Join(dir, path)
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		o := newIO(t, Config{})
		_, err := o.Open(t.Context(), "c", port.IOSpec{LogPath: path})
		if !errdefs.IsInvalidArgument(err) && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%.40q: %v", path, err)
		}
	}
	if _, err := os.Stat(outside); err == nil {
		t.Error("link was followed")
	}
}

func TestAttach(t *testing.T) {
	var closed atomic.Int32
	o := newIO(t, Config{StdinClosed: func(context.Context, string) { closed.Add(1) }})
	stdio, err := o.Open(t.Context(), "c", port.IOSpec{Stdin: true, StdinOnce: true})
	if err != nil {
		t.Fatal(err)
	}
	out, closeOut := shimEnd(t, stdio.Stdout)
	errs, closeErrs := shimEnd(t, stdio.Stderr)
	in, err := os.OpenFile(stdio.Stdin, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	var got, gotErr, other bytes.Buffer
	done := make(chan error, 2)
	go func() {
		done <- o.Attach(bounded(t), "c", pod.Streams{Stdin: strings.NewReader("input"), Stdout: &got, Stderr: &gotErr})
	}()
	go func() { done <- o.Attach(bounded(t), "c", pod.Streams{Stdout: &other}) }()
	c, err := o.get("c")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool {
		c.fanout.mu.Lock()
		defer c.fanout.mu.Unlock()
		return len(c.fanout.clients) == 2
	})
	if data, err := io.ReadAll(in); err != nil || string(data) != "input" {
		t.Errorf("input %q, %v", data, err)
	}
	fmt.Fprint(out, "out")
	fmt.Fprint(errs, "err")
	closeOut()
	closeErrs()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if got.String() != "out" || gotErr.String() != "err" || other.String() != "out" || closed.Load() != 1 {
		t.Errorf("got %q %q %q, closed %d", got.String(), gotErr.String(), other.String(), closed.Load())
	}
	if err := o.Attach(bounded(t), "c", pod.Streams{Stdout: &got}); err != nil {
		t.Errorf("attach after the end: %v", err)
	}
	if err := o.Close(bounded(t), "c"); err != nil {
		t.Error(err)
	}
	if err := o.Attach(bounded(t), "c", pod.Streams{}); !errdefs.IsNotFound(err) {
		t.Errorf("attach to the unknown: %v", err)
	}
}

// Clients of a silent container leave without a trace, and one that does not read is cut
// off without losing a byte of the log.
func TestAttachedClientsGo(t *testing.T) {
	dir := t.TempDir()
	logPath := filepath.Join(dir, "log")
	o := newIO(t, Config{Dir: dir})
	stdio, err := o.Open(t.Context(), "c", port.IOSpec{LogPath: logPath, Terminal: true, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	out, closeOut := shimEnd(t, stdio.Stdout)
	for range 50 {
		ctx, cancel := context.WithCancel(t.Context())
		in, w := io.Pipe()
		done := make(chan error, 1)
		go func() { done <- o.Attach(ctx, "c", pod.Streams{Stdin: in, Stdout: io.Discard}) }()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		_ = w.Close()
	}
	blocked := make(chan struct{})
	done := make(chan error, 1)
	go func() { done <- o.Attach(bounded(t), "c", pod.Streams{Stdout: blockingWriter(blocked)}) }()
	c, err := o.get("c")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool {
		c.fanout.mu.Lock()
		defer c.fanout.mu.Unlock()
		return len(c.fanout.clients) == 1
	})
	line := strings.Repeat("x", 1023) + "\n"
	const lines = 4096
	for range lines {
		if _, err := io.WriteString(out, line); err != nil {
			t.Fatal(err)
		}
	}
	closeOut()
	if err := o.Drain(bounded(t), "c"); err != nil {
		t.Fatal(err)
	}
	close(blocked)
	if err := <-done; !errdefs.IsResourceExhausted(err) {
		t.Errorf("slow client: %v", err)
	}
	if n := len(readLog(t, logPath)); n != lines {
		t.Errorf("%d of %d lines", n, lines)
	}
	if err := o.Stop(bounded(t)); err != nil {
		t.Error(err)
	}
}

// blockingWriter blocks until it is closed.
type blockingWriter chan struct{}

func (b blockingWriter) Write(p []byte) (int, error) {
	<-b
	return len(p), nil
}

func TestExecIO(t *testing.T) {
	o := newIO(t, Config{})
	var out bytes.Buffer
	x, err := o.OpenExec(t.Context(), "c", "e", false, pod.Streams{Stdin: strings.NewReader("in"), Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	stdout, closeOut := shimEnd(t, x.Stdio().Stdout)
	stderr, closeErr := shimEnd(t, x.Stdio().Stderr)
	in, err := os.OpenFile(x.Stdio().Stdin, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if data, err := io.ReadAll(in); err != nil || string(data) != "in" {
		t.Errorf("input %q, %v", data, err)
	}
	_ = in.Close()
	<-x.StdinDone()
	fmt.Fprint(stdout, "hello")
	fmt.Fprint(stderr, "thrown away")
	closeOut()
	closeErr()
	if err := x.Drain(bounded(t)); err != nil {
		t.Error(err)
	}
	if out.String() != "hello" {
		t.Errorf("output %q", out.String())
	}
	if err := errors.Join(x.Close(), x.Close()); err != nil {
		t.Error(err)
	}
	if _, err := o.OpenExec(t.Context(), "c", "../e", false, pod.Streams{}); err == nil {
		t.Error("bad id accepted")
	}
	none, err := o.OpenExec(t.Context(), "c", "n", true, pod.Streams{})
	if err != nil || none.Stdio() != (pod.Stdio{Terminal: true}) {
		t.Errorf("no streams: %+v, %v", none.Stdio(), err)
	}
	<-none.StdinDone()
	if err := errors.Join(none.Drain(bounded(t)), none.Close()); err != nil {
		t.Error(err)
	}
}

// A client that fails does not keep the process from writing on, nor one that sends nothing
// the exec from being closed.
func TestExecIOWithoutClient(t *testing.T) {
	o := newIO(t, Config{})
	in, inWriter := io.Pipe()
	r, w := io.Pipe()
	_ = r.Close()
	x, err := o.OpenExec(t.Context(), "c", "e", true, pod.Streams{Stdin: in, Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	stdout, closeOut := shimEnd(t, x.Stdio().Stdout)
	if _, err := stdout.Write(make([]byte, 1<<20)); err != nil {
		t.Error(err)
	}
	if err := x.Close(); err != nil {
		t.Error(err)
	}
	closeOut()
	_ = inWriter.Close()
	<-x.StdinDone()
	if err := o.Stop(bounded(t)); err != nil {
		t.Error(err)
	}
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		if !ok() {
			return errors.New("not yet")
		}
		return nil
	})
}
