package plugin

import (
	"errors"
	"net"
	"os"
	"time"
)

// trunk is a connection whose writes have a time limit. The multiplexer on top has
// none: a plugin that stops reading would hold every caller for ever.
type trunk struct {
	net.Conn
	limit time.Duration
}

// Write closes the connection if the peer does not take the data in time, because half
// a frame may have gone out.
func (t *trunk) Write(p []byte) (int, error) {
	if err := t.SetWriteDeadline(time.Now().Add(t.limit)); err != nil {
		return 0, err
	}
	n, err := t.Conn.Write(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errors.Join(err, t.Close())
	}
	return n, err
}
