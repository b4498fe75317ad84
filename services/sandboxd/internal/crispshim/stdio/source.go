package stdio

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// chunkSize is how much is read at once.
const chunkSize = 32 << 10

// busyPipe is the size of the pipe of a process that has filled half of an ordinary one before
// it was read: while the shim waits for its turn on a busy machine the process can go on.
const busyPipe = 512 << 10

// leftOver is how many chunks are still read after the end was asked for.
const leftOver = 64

// chunks lends buffers, so that a silent stream holds none.
var chunks = sync.Pool{New: func() any {
	b := make([]byte, chunkSize)
	return &b
}}

// source reads a pipe, a FIFO or a terminal.
type source struct {
	file *os.File
	raw  syscall.RawConn
	// grown says that the pipe was made larger, or that it was tried.
	grown bool
}

func newSource(f *os.File) *source {
	raw, err := f.SyscallConn()
	if err != nil {
		// Only of a file that is closed; reading it fails at once.
		raw = nil
	}
	return &source{file: f, raw: raw}
}

// wait waits until there is something to read. It returns io.EOF after the last writer, and
// os.ErrDeadlineExceeded after the deadline.
func (s *source) wait() error {
	if s.raw == nil {
		return io.EOF
	}
	var end error
	err := s.raw.Read(func(fd uintptr) bool {
		readable, hup := poll(int(fd))
		if hup && !readable {
			end = io.EOF
		}
		return readable || hup
	})
	if err != nil {
		return err
	}
	return end
}

// copyTo hands what comes to use, until the end of the stream, a deadline, or use fails.
// What is there at a deadline is handed over too, within a bound.
func (s *source) copyTo(use func(chunk []byte) error) {
	for {
		err := s.wait()
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		n, useErr := s.readOnce(use)
		if useErr != nil {
			return
		}
		if err == nil {
			continue
		}
		for left := leftOver; left > 0 && n > 0 && useErr == nil; left-- {
			n, useErr = s.readOnce(use)
		}
		return
	}
}

// readOnce reads one chunk and hands it over.
func (s *source) readOnce(use func(chunk []byte) error) (int, error) {
	buf, ok := chunks.Get().(*[]byte)
	if !ok {
		return 0, nil
	}
	defer chunks.Put(buf)
	n, err := s.read(*buf)
	if err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, nil
	}
	if n == len(*buf) && !s.grown {
		s.grow()
	}
	return n, use((*buf)[:n])
}

// grow makes the pipe larger. What is no pipe, or may not grow, stays as it is.
func (s *source) grow() {
	s.grown = true
	_ = s.raw.Control(func(fd uintptr) {
		if size, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0); err == nil && size < busyPipe {
			_, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, busyPipe)
		}
	})
}

// read reads what is there. It returns 0 bytes if nothing is; a terminal that nobody has open
// any more is at its end.
func (s *source) read(p []byte) (n int, err error) {
	ctlErr := s.raw.Control(func(fd uintptr) {
		for {
			n, err = unix.Read(int(fd), p)
			if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	switch {
	case ctlErr != nil:
		return 0, ctlErr
	case errors.Is(err, unix.EAGAIN):
		return 0, nil
	case errors.Is(err, unix.EIO):
		return 0, io.EOF
	}
	return max(n, 0), err
}

// poll asks whether a descriptor can be read and whether its writers have gone.
func poll(fd int) (readable, hup bool) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return false, false
		}
		return fds[0].Revents&unix.POLLIN != 0, fds[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0
	}
}
