package plugin

import (
	"bufio"
	"errors"
	"net"
	"os"
	"time"
)

// headerLength is that of the multiplexer's frames.
const headerLength = 8

// trunk is the connection below the multiplexer. Its writes have a time limit: the
// multiplexer has none, and a plugin that stops reading would hold every caller for ever.
// And a frame is one write, and as far as it has arrived one read, where the multiplexer
// has two: each costs a system call, and a write wakes up the peer.
//
// Reads, and writes, are made by one goroutine at a time; the multiplexer sees to that.
type trunk struct {
	net.Conn

	limit  time.Duration
	in     *bufio.Reader
	header []byte // of the frame whose payload comes next; empty if a header comes next
}

func newTrunk(c net.Conn, limit time.Duration) *trunk {
	return &trunk{Conn: c, limit: limit, in: bufio.NewReader(c), header: make([]byte, 0, headerLength)}
}

// Read implements net.Conn.
func (t *trunk) Read(p []byte) (int, error) { return t.in.Read(p) }

// Write keeps the header of a frame until its payload is written. It closes the connection
// if the peer does not take the data in time, because half a frame may have gone out.
func (t *trunk) Write(p []byte) (int, error) {
	if len(t.header) == 0 && len(p) == headerLength {
		t.header = append(t.header, p...)
		return len(p), nil
	}
	if err := t.SetWriteDeadline(time.Now().Add(t.limit)); err != nil {
		return 0, err
	}
	frame := net.Buffers{t.header, p}
	header := int64(len(t.header))
	n, err := frame.WriteTo(t.Conn)
	t.header = t.header[:0]
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errors.Join(err, t.Close())
	}
	return int(max(n-header, 0)), err
}
