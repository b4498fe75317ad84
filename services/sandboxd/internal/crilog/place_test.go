package crilog

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// A log stays below its folder, whatever lies on its path, and a refused one leaves nothing.
func TestPlaces(t *testing.T) {
	for _, tc := range []struct {
		name    string
		prepare func(dir, outside string) error
		log     string
		refused func(error) bool
	}{
		{"folders are made", nil, "a/b/log", nil},
		{"link as folder", func(dir, outside string) error { return os.Symlink(outside, filepath.Join(dir, "a")) }, "a/log", errdefs.IsInvalidArgument},
		{"link as folder of the folder", func(dir, outside string) error { return os.Symlink(outside, filepath.Join(dir, "a")) }, "a/b/log", errdefs.IsInvalidArgument},
		{"link as log", func(dir, outside string) error {
			return os.Symlink(filepath.Join(outside, "log"), filepath.Join(dir, "log"))
		}, "log", errdefs.IsInvalidArgument},
		{"link to a file", func(dir, outside string) error {
			return os.Symlink(filepath.Join(outside, "kept"), filepath.Join(dir, "log"))
		}, "log", errdefs.IsInvalidArgument},
		{"file as folder", func(dir, _ string) error { return os.WriteFile(filepath.Join(dir, "a"), nil, 0o600) }, "a/log", errdefs.IsFailedPrecondition},
		{"folder as log", func(dir, _ string) error { return os.Mkdir(filepath.Join(dir, "log"), 0o700) }, "log", errdefs.IsInvalidArgument},
		{"fifo as log", func(dir, _ string) error { return unix.Mkfifo(filepath.Join(dir, "log"), 0o600) }, "log", errdefs.IsInvalidArgument},
		{"outside", nil, "../outside/log", errdefs.IsInvalidArgument},
	} {
		t.Run(tc.name, func(t *testing.T) {
			top := t.TempDir()
			dir, outside := filepath.Join(top, "logs"), filepath.Join(top, "outside")
			// Links on the way to the folder are the administrator's.
			link := filepath.Join(top, "link")
			err := errors.Join(os.Mkdir(dir, 0o700), os.Mkdir(outside, 0o700), os.Symlink(dir, link), os.WriteFile(filepath.Join(outside, "kept"), []byte("kept"), 0o600))
			if err == nil && tc.prepare != nil {
				err = tc.prepare(dir, outside)
			}
			if err != nil {
				t.Fatal(err)
			}
			var dropped atomic.Uint64
			l, err := Open(Place{Dir: link, Path: filepath.Join(link, tc.log)}, slog.New(slog.DiscardHandler), &dropped)
			if tc.refused != nil {
				if !tc.refused(err) {
					t.Errorf("open: %v", err)
				}
			} else if err != nil {
				t.Error(err)
			} else {
				l.Write(t.Context(), []byte("record\n"))
				if err := l.Close(); err != nil {
					t.Error(err)
				}
				if text, err := os.ReadFile(filepath.Join(dir, tc.log)); err != nil || string(text) != "record\n" {
					t.Errorf("log %q: %v", text, err)
				}
			}
			entries, err := os.ReadDir(outside)
			if err != nil || len(entries) != 1 {
				t.Errorf("outside: %v: %v", entries, err)
			}
			if text, err := os.ReadFile(filepath.Join(outside, "kept")); err != nil || string(text) != "kept" {
				t.Errorf("outside: %q: %v", text, err)
			}
		})
	}
}

// What a running container writes is lost while its log cannot be opened, and no longer.
func TestResume(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "logs")
	at := Place{Dir: dir, Path: filepath.Join(dir, "log")}
	var dropped atomic.Uint64
	l := Resume(t.Context(), at, slog.New(slog.DiscardHandler), &dropped)
	l.Write(t.Context(), []byte("1\n"))
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) || dropped.Load() != 2 {
		t.Errorf("folder: %v; dropped %d", err, dropped.Load())
	}
	if err := l.Reopen(); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("reopen without the folder: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l.tried = l.tried.Add(-againTime)
	l.Write(t.Context(), []byte("2\n"))
	if err := errors.Join(l.Reopen(), l.Close()); err != nil {
		t.Error(err)
	}
	l.Write(t.Context(), []byte("3\n"))
	if text, err := os.ReadFile(at.Path); err != nil || string(text) != "2\n" {
		t.Errorf("log %q: %v", text, err)
	}
}

// A write that was cut short takes back only what is its own.
func TestTornWriteBesideAnotherWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	a, b := open(t, path), open(t, path)
	a.Write(t.Context(), []byte("torn"))
	b.Write(t.Context(), []byte("other\n"))
	a.takeBack(4)
	if text, err := os.ReadFile(path); err != nil || string(text) != "tornother\n" {
		t.Errorf("log %q: %v", text, err)
	}
	b.Write(t.Context(), []byte("torn"))
	b.takeBack(4)
	if text, err := os.ReadFile(path); err != nil || string(text) != "tornother\n" {
		t.Errorf("log %q: %v", text, err)
	}
	if err := errors.Join(a.Close(), b.Close()); err != nil {
		t.Error(err)
	}
}

// What the node lacks is told apart from failures.
func TestKindsOfErrors(t *testing.T) {
	t.Parallel()
	for err, is := range map[unix.Errno]func(error) bool{
		unix.EROFS: errdefs.IsFailedPrecondition, unix.ENOENT: errdefs.IsFailedPrecondition, unix.ENOTDIR: errdefs.IsFailedPrecondition,
		unix.ELOOP: errdefs.IsInvalidArgument, unix.EACCES: errdefs.IsPermissionDenied, unix.ENOSPC: errdefs.IsResourceExhausted,
		unix.EIO: errdefs.IsInternal,
	} {
		if !is(sentinelOf(err)) {
			t.Errorf("%v is %v", err, sentinelOf(err))
		}
	}
}
