package stdio

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crilog"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func open(t *testing.T, cfg Config) *Streams {
	t.Helper()
	s, err := Open(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := s.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		}
	})
	return s
}

// run runs a shell script with the streams; the returned function waits for its end.
func run(t *testing.T, s *Streams, script string) (wait func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", script)
	s.Set(cmd)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(nil); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := cmd.Wait(); err != nil {
			t.Errorf("script: %v", err)
		}
	}
}

func drained(t *testing.T, s *Streams) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	if err := s.Wait(ctx); err != nil {
		t.Errorf("output does not end: %v", err)
	}
}

func content(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func notThere(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func TestBadNamesAreRefused(t *testing.T) {
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		cfg Config
		is  func(error) bool
	}{
		"unknown scheme":    {Config{Stdout: "pigeon:///x"}, errdefs.IsNotImplemented},
		"no path":           {Config{Stdout: "file:"}, errdefs.IsInvalidArgument},
		"no url":            {Config{Stderr: "%zz"}, errdefs.IsInvalidArgument},
		"relative":          {Config{Stdout: "x"}, errdefs.IsNotImplemented},
		"no fifo there":     {Config{Stdout: filepath.Join(dir, "absent")}, notThere},
		"two logs":          {Config{Stdout: "crilog:///a", Stderr: "crilog:///b"}, errdefs.IsInvalidArgument},
		"line of no length": {Config{Stdout: "crilog:///a?max_line=0"}, errdefs.IsInvalidArgument},
		"line of words":     {Config{Stdout: "crilog:///a?max_line=many"}, errdefs.IsInvalidArgument},
		"program, unasked":  {Config{Stdout: "binary:///bin/true"}, errdefs.IsNotImplemented},
		"no such program":   {Config{Stdout: "binary:///absent", Monitor: runc.Monitor}, notThere},
	} {
		_, err := Open(t.Context(), tc.cfg, slog.New(slog.DiscardHandler))
		if !tc.is(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFilesAndFIFOs(t *testing.T) {
	dir := t.TempDir()
	fifo, in, out := filepath.Join(dir, "fifo"), filepath.Join(dir, "in"), filepath.Join(dir, "deep", "out")
	for _, path := range []string{fifo, in} {
		if err := unix.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	reader, err := os.OpenFile(fifo, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	writer, err := os.OpenFile(in, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, Config{Stdin: in, Stdout: "file://" + out, Stderr: fifo})
	wait := run(t, s, "cat; echo problem >&2")
	if _, err := io.WriteString(writer, "given\n"); err != nil {
		t.Fatal(err)
	}
	_ = writer.Close()
	// The shim itself holds the input open until it is told.
	if err := s.CloseStdin(); err != nil {
		t.Error(err)
	}
	wait()
	drained(t, s)
	if got := content(t, out); got != "given\n" {
		t.Errorf("output %q", got)
	}
	if got, err := io.ReadAll(reader); err != nil || string(got) != "problem\n" {
		t.Errorf("errors %q, %v", got, err)
	}
	if err := s.ReopenLog(); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("reopen: %v", err)
	}
	if err := s.Resize(1, 1); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("resize: %v", err)
	}
}

// A reader that goes away does not disturb the process, nor does one that never comes.
func TestFIFOWithoutAReader(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, Config{Stdout: fifo})
	run(t, s, "seq 1 1000")()
	drained(t, s)
}

func TestLogAndClientsInput(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	s := open(t, Config{Stdin: StdinName(true), Stdout: LogName(crilog.Place{Path: log}, 8), Stderr: LogName(crilog.Place{Path: log}, 8)})
	wait := run(t, s, "cat; echo bad >&2")
	for _, text := range []string{"12345", "6789\n"} {
		if err := s.WriteStdin([]byte(text), func() bool { return true }); err != nil {
			t.Error(err)
		}
	}
	s.StdinEnded()
	if err := s.WriteStdin([]byte("late"), func() bool { return true }); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("input after its end: %v", err)
	}
	wait()
	drained(t, s)
	// Nothing orders what comes out of two pipes, only what comes out of each.
	got := map[string]string{}
	for line := range strings.Lines(content(t, log)) {
		_, record, _ := strings.Cut(line, " ")
		stream, record, _ := strings.Cut(record, " ")
		tag, text, _ := strings.Cut(strings.TrimSuffix(record, "\n"), " ")
		if tag == "F" {
			text += "\n"
		}
		got[stream] += text
	}
	if want := map[string]string{"stdout": "123456789\n", "stderr": "bad\n"}; !maps.Equal(got, want) {
		t.Errorf("records %q", content(t, log))
	}
	if err := s.ReopenLog(); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("reopen after the end: %v", err)
	}
}

// A process that does not read its input blocks only a client that is still there.
func TestInputOfAProcessThatDoesNotRead(t *testing.T) {
	s := open(t, Config{Stdin: StdinName(false), Stdout: LogName(crilog.Place{}, 0)})
	wait := run(t, s, "sleep 1.5")
	err := s.WriteStdin(bytes.Repeat([]byte("x"), 1<<20), func() bool { return false })
	if !errdefs.IsFailedPrecondition(err) {
		t.Error(err)
	}
	wait()
}

// What holds an output open after the process does not hold the close up for long.
func TestCloseWithAnOpenOutput(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	s := open(t, Config{Stdout: LogName(crilog.Place{Path: log}, 0)})
	hold, err := os.CreateTemp(t.TempDir(), "pid")
	if err != nil {
		t.Fatal(err)
	}
	run(t, s, "sleep 30 & echo $! >"+hold.Name()+"; echo said")()
	began := time.Now()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(began); d > closeTime {
		t.Errorf("took %s", d)
	}
	if got := content(t, log); !strings.Contains(got, " stdout F said\n") {
		t.Errorf("log %q", got)
	}
	if err := exec.CommandContext(t.Context(), "/bin/sh", "-c", "kill $(cat "+hold.Name()+")").Run(); err != nil {
		t.Error(err)
	}
}

func TestLoggingProgram(t *testing.T) {
	dir := t.TempDir()
	out, program := filepath.Join(dir, "out"), filepath.Join(dir, "program")
	script := "#!/bin/sh\nexec 5>&-\n{ echo \"$CONTAINER_ID $CONTAINER_NAMESPACE $1 $2\"; cat <&3; cat <&4; } >" + out + "\n"
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	s := open(t, Config{Stdout: "binary://" + program + "?key=value", ID: "c", Namespace: "ns", Monitor: runc.Monitor})
	run(t, s, "echo out; echo err >&2")()
	drained(t, s)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if got := content(t, out); got != "c ns key value\nout\nerr\n" {
		t.Errorf("the program got %q", got)
	}
}

// A process that writes faster than it is read for a while gets more room, a quiet one does not.
func TestBusyProcessGetsALargerPipe(t *testing.T) {
	for _, tc := range []struct {
		bytes int
		grown bool
	}{{1 << 10, false}, {chunkSize, true}} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		before, err := unix.FcntlInt(w.Fd(), unix.F_GETPIPE_SZ, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, tc.bytes)); err != nil {
			t.Fatal(err)
		}
		read := 0
		stop := errors.New("enough")
		newSource(r).copyTo(func(chunk []byte) error {
			if read += len(chunk); read == tc.bytes {
				return stop
			}
			return nil
		})
		after, err := unix.FcntlInt(w.Fd(), unix.F_GETPIPE_SZ, 0)
		if err != nil || (after > before) != tc.grown {
			t.Errorf("%d bytes at once: a pipe of %d bytes, before %d, %v", tc.bytes, after, before, err)
		}
		if err := errors.Join(r.Close(), w.Close()); err != nil {
			t.Error(err)
		}
	}
}
