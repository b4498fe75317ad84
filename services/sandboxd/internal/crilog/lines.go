// Package crilog writes the logs of containers in the format of the CRI: one record per line,
// with time, stream, tag and content.
//
// The contents of the records of a stream, joined, are the bytes that were written to it. A
// log that cannot be written loses whole records, with a count, and holds nobody up. The
// package reads no stream and knows no containers.
package crilog

import (
	"bytes"
	"time"
)

// Names of the streams in a log.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// DefaultMaxLineSize is the content of the longest record, as other runtimes have it.
const DefaultMaxLineSize = 16 << 10

// Lines turns the bytes of one stream into records of a CRI log: time, stream, tag, content.
// A line that is longer than the limit becomes several records, all but the last tagged P.
// It keeps at most as many bytes as the limit between calls, and is not safe for concurrent
// use.
type Lines struct {
	stream  string
	max     int
	partial []byte
	// prefix is the time and the stream as text, which all records of a chunk share.
	prefix []byte
	at     time.Time // of the prefix
}

// NewLines returns the records of a stream with contents of at most maxSize bytes; 0 or less
// means DefaultMaxLineSize.
func NewLines(stream string, maxSize int) *Lines {
	if maxSize <= 0 {
		maxSize = DefaultMaxLineSize
	}
	return &Lines{stream: stream, max: maxSize}
}

// Append appends to dst the records that chunk completes.
func (l *Lines) Append(dst, chunk []byte, now time.Time) []byte {
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
func (l *Lines) keep(content []byte) {
	switch {
	case len(content) > 0:
		l.partial = append(l.partial[:0], content...)
	case cap(l.partial) > 4<<10:
		l.partial = nil
	default:
		l.partial = l.partial[:0]
	}
}

// Flush appends the unfinished line at the end of the stream.
func (l *Lines) Flush(dst []byte, now time.Time) []byte {
	if len(l.partial) > 0 {
		dst = l.record(dst, l.partial, 'P', now)
	}
	l.partial = nil
	return dst
}

func (l *Lines) record(dst, content []byte, tag byte, now time.Time) []byte {
	if len(l.prefix) == 0 || !now.Equal(l.at) {
		l.prefix = append(now.AppendFormat(l.prefix[:0], time.RFC3339Nano), ' ')
		l.prefix = append(l.prefix, l.stream...)
		l.at = now
	}
	dst = append(dst, l.prefix...)
	dst = append(dst, ' ', tag, ' ')
	dst = append(dst, content...)
	return append(dst, '\n')
}
