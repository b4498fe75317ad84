package crilog

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
)

const (
	logMode = 0o640
	// againTime is how often it is tried to open a log that could not be opened.
	againTime = time.Second
)

// Place is where a log lies.
type Place struct {
	// Dir is a folder that the log does not leave: links on the way to it are followed, below
	// it none is. Empty means the folder of Path.
	Dir string
	// Path is the absolute path of the log, below Dir. Empty means no log.
	Path string
}

// File is the log of one container, which both of its streams write to. A write that
// fails loses its records, and no more: the next one is tried anew. It is safe for
// concurrent use.
type File struct {
	place   Place
	log     *slog.Logger
	dropped *atomic.Uint64

	// mu guards the rest and keeps the records of the streams apart.
	mu      sync.Mutex
	file    *os.File  // nil if it could not be opened yet, or is closed
	tried   time.Time // when it was last tried to open it
	closed  bool
	failing bool
}

// Open opens the log at a place for appending and makes missing folders; without a path
// everything is thrown away. Bytes of records that could not be written are added to dropped.
// It fails with ErrInvalidArgument if there is something else than a regular file.
func Open(at Place, log *slog.Logger, dropped *atomic.Uint64) (*File, error) {
	l := &File{place: at, log: log, dropped: dropped}
	if at.Path == "" {
		return l, nil
	}
	f, err := openSafe(at, true)
	if err != nil {
		return nil, err
	}
	l.file = f
	return l, nil
}

// Resume opens the log of a container that writes already. It makes no folder, and a log that
// cannot be opened is lost until it can be.
func Resume(ctx context.Context, at Place, log *slog.Logger, dropped *atomic.Uint64) *File {
	l := &File{place: at, log: log, dropped: dropped}
	if at.Path != "" {
		l.tryOpen(ctx)
	}
	return l
}

// Path is the path of the log.
func (l *File) Path() string { return l.place.Path }

// tryOpen opens a log that could not be opened before, at most once in a while.
func (l *File) tryOpen(ctx context.Context) {
	if time.Since(l.tried) < againTime {
		return
	}
	l.tried = time.Now()
	f, err := openSafe(l.place, false)
	if err != nil {
		l.fail(ctx, err)
		return
	}
	l.file = f
}

// fail tells once that the log is not written.
func (l *File) fail(ctx context.Context, err error) {
	if l.failing {
		return
	}
	l.failing = true
	l.log.ErrorContext(ctx, "container log is not written", slog.String("path", l.place.Path), slog.String("error", err.Error()))
}

// Write writes whole records with one call.
func (l *File) Write(ctx context.Context, records []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.place.Path == "" || l.closed || len(records) == 0 {
		return
	}
	if l.file == nil {
		l.tryOpen(ctx)
	}
	if l.file == nil {
		l.dropped.Add(uint64(len(records)))
		return
	}
	n, err := l.file.Write(records)
	if err == nil {
		if l.failing {
			l.failing = false
			l.log.InfoContext(ctx, "container log is written again", slog.String("path", l.place.Path))
		}
		return
	}
	l.dropped.Add(uint64(len(records)))
	if n > 0 {
		l.takeBack(int64(n))
	}
	l.fail(ctx, err)
}

// takeBack removes the torn end of a write that was cut short, unless another writer of the
// same file has gone on after it.
func (l *File) takeBack(n int64) {
	st, err := l.file.Stat()
	if err != nil {
		return
	}
	at, err := l.file.Seek(0, io.SeekCurrent)
	if err == nil && at == st.Size() && at >= n {
		_ = l.file.Truncate(at - n)
	}
}

// Reopen opens the path anew and writes there from now on. If that fails, writing goes on
// where it was, and no file was made.
func (l *File) Reopen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.place.Path == "" {
		return nil
	}
	if l.closed {
		return fmt.Errorf("log %s is closed: %w", l.place.Path, errdefs.ErrFailedPrecondition)
	}
	f, err := openSafe(l.place, false)
	if err != nil {
		return err
	}
	old := l.file
	l.file = f
	if old == nil {
		return nil
	}
	return old.Close()
}

// Close ends the writing.
func (l *File) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.file == nil {
		return nil
	}
	f := l.file
	l.file = nil
	return f.Close()
}
