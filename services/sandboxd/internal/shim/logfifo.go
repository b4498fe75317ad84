package shim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	logFile = "log"
	// maxLogLine is where a line of a shim's log is cut.
	maxLogLine = 8 << 10
)

// openLog opens the FIFO that a shim logs into, making it if need be. It must be open
// before the shim starts, or the shim would wait for a reader.
func openLog(dir string) (*os.File, error) {
	path := filepath.Join(dir, logFile)
	if err := unix.Mkfifo(path, 0o600); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("shim log %s: %w", path, err)
	}
	// Open for writing too: the end of a writer is then not the end of the log.
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("shim log: %w", err)
	}
	if st, err := f.Stat(); err != nil || st.Mode().Type() != fs.ModeNamedPipe {
		return nil, errors.Join(fmt.Errorf("shim log %s is not a fifo", path), err, f.Close())
	}
	return f, nil
}

// copyLog copies a shim's log line by line into the own one until f is closed.
func copyLog(ctx context.Context, log *slog.Logger, f *os.File) {
	r := bufio.NewReaderSize(f, maxLogLine)
	for {
		line, err := r.ReadSlice('\n')
		if text := strings.TrimSpace(string(line)); text != "" {
			log.LogAttrs(ctx, levelOf(text), "shim log", slog.String("line", strings.ToValidUTF8(text, "?")))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// levelOf reads the level of a line in the key=value form that most shims use.
func levelOf(line string) slog.Level {
	_, rest, ok := strings.Cut(line, "level=")
	if !ok {
		return slog.LevelInfo
	}
	level, _, _ := strings.Cut(rest, " ")
	switch strings.Trim(level, `"`) {
	case "debug", "trace":
		return slog.LevelDebug
	case "warning", "warn":
		return slog.LevelWarn
	case "error", "fatal", "panic":
		return slog.LevelError
	default:
		return slog.LevelInfo
	}
}
