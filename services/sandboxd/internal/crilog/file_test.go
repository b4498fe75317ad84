package crilog

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func open(t testing.TB, path string) *File {
	t.Helper()
	var dropped atomic.Uint64
	l, err := Open(Place{Path: path}, slog.New(slog.DiscardHandler), &dropped)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestOpenAppendsToRegularFilesOnly(t *testing.T) {
	if _, err := openSafe(Place{Path: "/dev/null"}, false); !errdefs.IsInvalidArgument(err) {
		t.Errorf("device: %v", err)
	}
	regular := filepath.Join(t.TempDir(), "regular")
	if err := os.WriteFile(regular, []byte("kept\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l := open(t, regular)
	l.Write(t.Context(), []byte("new\n"))
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if data, _ := os.ReadFile(regular); string(data) != "kept\nnew\n" {
		t.Errorf("appended: %q", data)
	}
}

func TestReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l := open(t, path)
	l.Write(t.Context(), []byte("1\n"))
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	l.Write(t.Context(), []byte("2\n"))
	if err := l.Reopen(); err != nil {
		t.Fatal(err)
	}
	l.Write(t.Context(), []byte("3\n"))
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	old, _ := os.ReadFile(path + ".1")
	now, _ := os.ReadFile(path)
	if string(old) != "1\n2\n" || string(now) != "3\n" {
		t.Errorf("old %q, new %q", old, now)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := l.Reopen(); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("reopen of a closed log: %v", err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("failed reopen made a file")
	}
}

// A log that cannot be written for a while loses whole records and goes on.
func TestWriteErrors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	var dropped atomic.Uint64
	l, err := Open(Place{Path: path}, slog.New(slog.DiscardHandler), &dropped)
	if err != nil {
		t.Fatal(err)
	}
	l.Write(t.Context(), []byte("1\n"))
	good := l.file
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	l.file = full
	l.Write(t.Context(), []byte("2\n"))
	l.file = good
	l.Write(t.Context(), []byte("3\n"))
	if err := errors.Join(l.Close(), full.Close()); err != nil {
		t.Error(err)
	}
	l.Write(t.Context(), []byte("4\n"))
	if data, _ := os.ReadFile(path); string(data) != "1\n3\n" || dropped.Load() != 2 {
		t.Errorf("log %q, dropped %d", data, dropped.Load())
	}
}

func BenchmarkWrite(b *testing.B) {
	log := open(b, filepath.Join(b.TempDir(), "log"))
	l := NewLines(Stdout, 0)
	chunk := bytes.Repeat([]byte(strings.Repeat("x", 79)+"\n"), (32<<10)/80)
	b.SetBytes(int64(len(chunk)))
	var records []byte
	for b.Loop() {
		records = l.Append(records[:0], chunk, time.Now())
		log.Write(b.Context(), records)
		_ = log.file.Truncate(0)
	}
	if err := log.Close(); err != nil {
		b.Error(err)
	}
}
