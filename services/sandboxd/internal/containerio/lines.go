package containerio

import (
	"bytes"
	"time"
)

// Names of the streams in a log.
const (
	streamStdout = "stdout"
	streamStderr = "stderr"
)

// lines turns the bytes of one stream into records of a CRI log: time, stream, tag, content.
// A line that is longer than max bytes becomes several records, all but the last tagged P.
// It keeps at most max bytes between calls.
type lines struct {
	stream  string
	max     int
	partial []byte
}

// append appends to dst the records that chunk completes.
func (l *lines) append(dst, chunk []byte, now time.Time) []byte {
	for len(chunk) > 0 {
		line, rest, complete := bytes.Cut(chunk, []byte{'\n'})
		chunk = rest
		content := line
		if len(l.partial) > 0 {
			l.partial = append(l.partial, line...)
			content = l.partial
		}
		for len(content) > l.max {
			dst = l.record(dst, content[:l.max], 'P', now)
			content = content[l.max:]
		}
		if complete {
			dst = l.record(dst, content, 'F', now)
			content = nil
		}
		l.keep(content)
	}
	return dst
}

// keep remembers an unfinished line. A buffer that has served a long line is given back.
func (l *lines) keep(content []byte) {
	switch {
	case len(content) > 0:
		l.partial = append(l.partial[:0], content...)
	case cap(l.partial) > 4<<10:
		l.partial = nil
	default:
		l.partial = l.partial[:0]
	}
}

// flush appends the unfinished line at the end of the stream.
func (l *lines) flush(dst []byte, now time.Time) []byte {
	if len(l.partial) > 0 {
		dst = l.record(dst, l.partial, 'P', now)
	}
	l.partial = nil
	return dst
}

func (l *lines) record(dst, content []byte, tag byte, now time.Time) []byte {
	dst = now.AppendFormat(dst, time.RFC3339Nano)
	dst = append(dst, ' ')
	dst = append(dst, l.stream...)
	dst = append(dst, ' ', tag, ' ')
	dst = append(dst, content...)
	return append(dst, '\n')
}
