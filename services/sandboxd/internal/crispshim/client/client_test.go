package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/attach"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/stdio"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// process stands for a process with its ends of the streams.
type process struct {
	streams *stdio.Streams
	stdin   *os.File
	stdout  *os.File
	stderr  *os.File
}

// setup serves one container, "c", under a folder whose name is too long for a socket.
func setup(t *testing.T, spec port.IOSpec) (*IO, *process) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), strings.Repeat("x", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	o := New(Config{Bundle: func(string) (string, error) { return dir, nil }, MaxLineSize: 64})
	names, err := o.Open(t.Context(), "c", spec)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	s, err := stdio.Open(t.Context(), stdio.Config{Stdin: names.Stdin, Stdout: names.Stdout, Stderr: names.Stderr}, log)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{streams: s}
	// A command that is never run takes the ends.
	var cmd exec.Cmd
	s.Set(&cmd)
	p.stdin, p.stdout, p.stderr = dup(t, cmd.Stdin), dup(t, cmd.Stdout), dup(t, cmd.Stderr)
	if err := s.Run(nil); err != nil {
		t.Fatal(err)
	}
	server := attach.NewServer(attach.SocketName, func(id string) (attach.Target, error) {
		if id != "c" {
			return nil, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
		}
		return s, nil
	}, log)
	if err := server.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.exit()
		if err := errors.Join(server.Close(), s.Close()); err != nil {
			t.Error(err)
		}
		o.Wait()
	})
	return o, p
}

// dup copies an end, as starting a process does.
func dup(t *testing.T, end any) *os.File {
	t.Helper()
	f, ok := end.(*os.File)
	if !ok {
		return nil
	}
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), f.Name())
}

// exit closes the process's ends.
func (p *process) exit() {
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

func TestAttachAndDrain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	o, p := setup(t, port.IOSpec{LogPath: path, Stdin: true, StdinOnce: true})
	var out, errs bytes.Buffer
	done := make(chan error, 1)
	go func() {
		done <- o.Attach(t.Context(), "c", pod.Streams{Stdin: strings.NewReader("input"), Stdout: &out, Stderr: &errs})
	}()
	// The end of the only client's input is the end of the process's input.
	if data, err := io.ReadAll(p.stdin); err != nil || string(data) != "input" {
		t.Fatalf("input %q, %v", data, err)
	}
	fmt.Fprintf(p.stdout, "out\n%s", strings.Repeat("y", 70))
	fmt.Fprint(p.stderr, "err\n")
	p.exit()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	if err := o.Drain(ctx, "c"); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if out.String() != "out\n"+strings.Repeat("y", 70) || errs.String() != "err\n" {
		t.Errorf("got %q, %q", out.String(), errs.String())
	}
	data, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(data), " stdout F out\n") || !strings.Contains(string(data), " stderr F err\n") ||
		!strings.Contains(string(data), " stdout P "+strings.Repeat("y", 64)+"\n") || !strings.HasSuffix(string(data), " stdout P yyyyyy\n") && !strings.Contains(string(data), " stdout P yyyyyy\n") {
		t.Errorf("log %q, %v", data, err)
	}
	if err := o.ReopenLog(ctx, "c"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("reopen after the end: %v", err)
	}
	if err := o.Attach(ctx, "c", pod.Streams{}); err != nil {
		t.Errorf("attach after the end: %v", err)
	}
	if err := o.Attach(ctx, "d", pod.Streams{}); !errdefs.IsNotFound(err) {
		t.Errorf("attach to the unknown: %v", err)
	}
	if err := o.Drain(ctx, "d"); err != nil {
		t.Errorf("drain of the unknown: %v", err)
	}
}

// Clients of a silent process that does not read leave without a trace.
func TestClientsGo(t *testing.T) {
	o, _ := setup(t, port.IOSpec{Stdin: true})
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- o.Attach(ctx, "c", pod.Streams{Stdin: bytes.NewReader(make([]byte, 1<<20)), Stdout: io.Discard})
		}()
		time.Sleep(5 * time.Millisecond)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
}

// A client that does not read is cut off; the log has everything.
func TestSlowClient(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	o, p := setup(t, port.IOSpec{LogPath: path})
	client := blockingWriter{entered: make(chan struct{}), released: make(chan struct{})}
	done := make(chan error, 1)
	go func() { done <- o.Attach(t.Context(), "c", pod.Streams{Stdout: client}) }()
	lines := 0
	write := func() {
		if _, err := io.WriteString(p.stdout, strings.Repeat("z", 63)+"\n"); err != nil {
			t.Fatal(err)
		}
		lines++
	}
	// It gets what comes after it.
	testkit.Eventually(t, testkit.Patience, func() error {
		write()
		select {
		case <-client.entered:
			return nil
		default:
			return errors.New("the client gets nothing")
		}
	})
	for range 1 << 16 {
		write()
	}
	p.exit()
	if err := o.Drain(t.Context(), "c"); err != nil {
		t.Error(err)
	}
	data, err := os.ReadFile(path)
	if n := bytes.Count(data, []byte("\n")); err != nil || n != lines {
		t.Errorf("%d of %d lines, %v", n, lines, err)
	}
	close(client.released)
	if err := <-done; !errdefs.IsResourceExhausted(err) {
		t.Errorf("slow client: %v", err)
	}
}

// blockingWriter blocks from its first write on until it is released.
type blockingWriter struct{ entered, released chan struct{} }

func (b blockingWriter) Write(p []byte) (int, error) {
	select {
	case <-b.released:
	case b.entered <- struct{}{}:
		<-b.released
	}
	return len(p), nil
}
