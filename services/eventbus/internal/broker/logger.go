package broker

import (
	"fmt"
	"log/slog"
	"sync"
)

// logger passes the server's lines on to slog and remembers the last fatal one. The
// server calls it without a context, so the lines belong to no trace.
type logger struct {
	log *slog.Logger

	// mu guards fatal.
	mu    sync.Mutex
	fatal string
}

// Noticef is Debug: the server tells a page about itself at each start.
func (l *logger) Noticef(format string, v ...any) { l.log.Debug("nats", text(format, v)) }

func (l *logger) Warnf(format string, v ...any) { l.log.Warn("nats", text(format, v)) }

func (l *logger) Errorf(format string, v ...any) { l.log.Error("nats", text(format, v)) }

// Fatalf does not end the process: that the server does not get ready is what counts.
func (l *logger) Fatalf(format string, v ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fatal = fmt.Sprintf(format, v...)
	l.log.Error("nats", text(format, v))
}

func (l *logger) Debugf(format string, v ...any) { l.log.Debug("nats", text(format, v)) }

func (l *logger) Tracef(format string, v ...any) { l.log.Debug("nats", text(format, v)) }

func (l *logger) lastFatal() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}

func text(format string, v []any) slog.Attr { return slog.String("text", fmt.Sprintf(format, v...)) }
