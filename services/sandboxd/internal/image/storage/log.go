package storage

import (
	"context"
	"io"
	"log/slog"

	"github.com/containerd/errdefs"
	containerdlog "github.com/containerd/log" //nolint:depguard // the library logs with it; it ends in slog here
	"github.com/sirupsen/logrus"              //nolint:depguard // as above
)

// newEntry returns a logger for containerd's packages that ends in log. They are talkative:
// what they call information is a detail here.
func newEntry(ctx context.Context, log *slog.Logger) *containerdlog.Entry {
	l := logrus.New()
	l.SetOutput(io.Discard)
	l.SetLevel(logrus.DebugLevel)
	l.AddHook(logHook{log, context.WithoutCancel(ctx)})
	return logrus.NewEntry(l)
}

// AdoptLibraryLogs makes the few messages that libraries write to logrus' global logger end
// in log. A process calls it once, before it opens a storage.
func AdoptLibraryLogs(ctx context.Context, log *slog.Logger) {
	global := logrus.StandardLogger()
	global.SetOutput(io.Discard)
	global.SetLevel(logrus.DebugLevel)
	global.ReplaceHooks(logrus.LevelHooks{})
	global.AddHook(logHook{log, context.WithoutCancel(ctx)})
}

type logHook struct {
	log *slog.Logger
	ctx context.Context //nolint:containedctx // for messages that come without one
}

// Levels implements logrus.Hook.
func (logHook) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements logrus.Hook.
func (h logHook) Fire(e *logrus.Entry) error {
	level := slog.LevelDebug
	switch e.Level {
	case logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel, logrus.WarnLevel:
		level = slog.LevelWarn
	case logrus.InfoLevel, logrus.DebugLevel, logrus.TraceLevel:
	}
	if err, ok := e.Data[logrus.ErrorKey].(error); ok && errdefs.IsNotFound(err) {
		level = slog.LevelDebug // a clean-up that was done already
	}
	ctx := e.Context
	if ctx == nil {
		ctx = h.ctx
	}
	if !h.log.Enabled(ctx, level) {
		return nil
	}
	attrs := make([]slog.Attr, 0, len(e.Data)+1)
	attrs = append(attrs, slog.String("text", e.Message))
	for k, v := range e.Data {
		attrs = append(attrs, slog.Any(k, v))
	}
	h.log.LogAttrs(ctx, level, "message of the image library", attrs...)
	return nil
}
