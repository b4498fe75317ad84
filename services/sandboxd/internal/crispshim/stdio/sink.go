package stdio

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crilog"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/attach"
)

// Schemes of names of streams.
const (
	schemeFIFO   = "fifo"
	schemeLog    = "crilog"
	schemeFile   = "file"
	schemeBinary = "binary"
)

// What a name of a log tells beside its path.
const (
	queryMaxLine = "max_line"
	queryDir     = "dir"
)

// maxRecords is the size above which a buffer for records is not kept.
const maxRecords = 2 * chunkSize

// name is the parsed name of a stream.
type name struct {
	scheme, path string
	query        url.Values
}

// parseName parses the name of a stream; no scheme means no stream.
func parseName(s string) (name, error) {
	switch {
	case s == "":
		return name{}, nil
	case filepath.IsAbs(s):
		return name{scheme: schemeFIFO, path: s}, nil
	}
	u, err := url.Parse(s)
	if err != nil {
		return name{}, fmt.Errorf("stream %q: %w: %w", s, err, errdefs.ErrInvalidArgument)
	}
	switch u.Scheme {
	case schemeFIFO, schemeLog, schemeFile, schemeBinary:
	default:
		return name{}, fmt.Errorf("stream %q: unknown scheme: %w", s, errdefs.ErrNotImplemented)
	}
	if u.Path == "" && u.Scheme != schemeLog {
		return name{}, fmt.Errorf("stream %q has no path: %w", s, errdefs.ErrInvalidArgument)
	}
	return name{scheme: u.Scheme, path: u.Path, query: u.Query()}, nil
}

// LogName is the name of an output that is logged at a place in the CRI format, in records of
// at most maxLine bytes; without a path only attached clients get it.
func LogName(at crilog.Place, maxLine int) string {
	u := url.URL{Scheme: schemeLog, Path: at.Path}
	query := url.Values{}
	if maxLine > 0 {
		query.Set(queryMaxLine, strconv.Itoa(maxLine))
	}
	if at.Path != "" && at.Dir != "" {
		query.Set(queryDir, at.Dir)
	}
	u.RawQuery = query.Encode()
	return u.String()
}

// StdinName is the name of an input that attached clients send; with once it ends with the
// first of them.
func StdinName(once bool) string {
	if once {
		return schemeLog + ":?once=1"
	}
	return schemeLog + ":"
}

// IsLog says whether a stream is of the kind that clients attach to.
func IsLog(s string) bool { return strings.HasPrefix(s, schemeLog+":") }

// sink takes the output of one stream, from one goroutine.
type sink interface {
	// write takes a chunk; after an error nothing more is read from the process.
	write(chunk []byte) error
	// finish is called at the end.
	finish()
}

type discard struct{}

func (discard) write([]byte) error { return nil }
func (discard) finish()            {}

// openSinks opens what is named for the outputs.
func (s *Streams) openSinks(ctx context.Context) error {
	out, err := parseName(s.cfg.Stdout)
	if err != nil {
		return err
	}
	errs, err := parseName(s.cfg.Stderr)
	if err != nil {
		return err
	}
	if s.cfg.Terminal {
		errs = name{}
	}
	switch {
	case out.scheme == schemeBinary:
		return s.openProgram(ctx, out)
	case out.scheme == schemeLog || errs.scheme == schemeLog:
		return s.openLog(ctx, out, errs)
	}
	for kind, n := range map[attach.Kind]name{attach.Output: out, attach.Errors: errs} {
		if n.scheme == "" {
			continue
		}
		f, err := openPlain(n)
		if err != nil {
			return err
		}
		s.closers = append(s.closers, closer{f})
		s.sinks[kind] = plainSink{f}
	}
	return nil
}

// openPlain opens a FIFO or a file. A FIFO is opened for both directions: its reader may go
// and come back without the process noticing more than a full pipe.
func openPlain(n name) (*os.File, error) {
	if n.scheme == schemeFIFO {
		f, err := os.OpenFile(n.path, os.O_RDWR|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, fmt.Errorf("output: %w", err)
		}
		return f, nil
	}
	if err := os.MkdirAll(filepath.Dir(n.path), 0o755); err != nil {
		return nil, fmt.Errorf("output: %w", err)
	}
	f, err := os.OpenFile(n.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("output: %w", err)
	}
	return f, nil
}

// closer closes a file that may be closed already.
type closer struct{ f *os.File }

// Close closes the file.
func (c closer) Close() error {
	if err := c.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// plainSink copies bytes as they are.
type plainSink struct{ file *os.File }

func (p plainSink) write(chunk []byte) error {
	_, err := p.file.Write(chunk)
	if errors.Is(err, os.ErrClosed) {
		return err
	}
	// What cannot be written is lost, which is no reason for the process to stop.
	return nil
}

func (p plainSink) finish() { _ = p.file.Close() }

// logSink writes a stream into a log in the CRI format and to attached clients.
type logSink struct {
	kind  attach.Kind
	file  *crilog.File
	lines *crilog.Lines
	hub   *attach.Hub
	ctx   context.Context //nolint:containedctx // carries values for the log, no end
}

// records lends buffers for the records of a chunk, so that a silent stream holds none.
var records = sync.Pool{New: func() any { return new([]byte) }}

// openLog opens the log that both outputs share.
func (s *Streams) openLog(ctx context.Context, out, errs name) error {
	if errs.scheme != "" && (errs.scheme != out.scheme || errs.path != out.path) {
		return fmt.Errorf("outputs %q and %q do not share a log: %w", s.cfg.Stdout, s.cfg.Stderr, errdefs.ErrInvalidArgument)
	}
	maxLine := 0
	if v := out.query.Get(queryMaxLine); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 {
			return fmt.Errorf("output %q: max_line: %w", s.cfg.Stdout, errdefs.ErrInvalidArgument)
		}
		maxLine = n
	}
	ctx = context.WithoutCancel(ctx)
	file, err := crilog.Open(crilog.Place{Dir: out.query.Get(queryDir), Path: out.path}, s.log.With(slog.String("container_id", s.cfg.ID)), new(atomic.Uint64))
	if err != nil {
		return err
	}
	s.file = file
	s.hub = &attach.Hub{}
	streams := map[attach.Kind]string{attach.Output: crilog.Stdout}
	if !s.cfg.Terminal && errs.scheme != "" {
		streams[attach.Errors] = crilog.Stderr
	}
	for kind, stream := range streams {
		s.sinks[kind] = &logSink{kind: kind, file: file, lines: crilog.NewLines(stream, maxLine), hub: s.hub, ctx: ctx}
	}
	return nil
}

func (l *logSink) write(chunk []byte) error {
	if l.file.Path() != "" {
		if buf, ok := records.Get().(*[]byte); ok {
			*buf = l.lines.Append((*buf)[:0], chunk, time.Now())
			l.file.Write(l.ctx, *buf)
			if cap(*buf) <= maxRecords {
				records.Put(buf)
			}
		}
	}
	l.hub.Publish(l.kind, chunk)
	return nil
}

func (l *logSink) finish() {
	l.file.Write(l.ctx, l.lines.Flush(nil, time.Now()))
}
