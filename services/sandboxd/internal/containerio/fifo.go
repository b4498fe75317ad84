package containerio

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// chunkSize is how much is read at once.
const chunkSize = 32 << 10

// chunks lends buffers, so that a silent stream holds none.
var chunks = sync.Pool{New: func() any {
	b := make([]byte, chunkSize)
	return &b
}}

// makeFIFO makes a FIFO or finds it.
func makeFIFO(path string) error {
	err := unix.Mkfifo(path, 0o600)
	if err == nil {
		return nil
	}
	if !errors.Is(err, fs.ErrExist) {
		return &fs.PathError{Op: "mkfifo", Path: path, Err: err}
	}
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if st.Mode().Type() != fs.ModeNamedPipe {
		return fmt.Errorf("%s is not a fifo: %w", path, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// openFIFO opens a FIFO without waiting for its other end.
func openFIFO(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
}

// source is the reading end of a FIFO. Its end is when the last writer has closed; before
// the first writer has opened, reading just waits.
type source struct {
	path string
	file *os.File
	raw  syscall.RawConn
}

func openSource(path string) (*source, error) {
	if err := makeFIFO(path); err != nil {
		return nil, err
	}
	f, err := openFIFO(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &source{path: path, file: f, raw: raw}, nil
}

// wait waits until there is something to read. It returns io.EOF after the last writer, and
// os.ErrDeadlineExceeded after interrupt.
func (s *source) wait() error {
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

// read reads what is there. It returns 0 bytes if nothing is.
func (s *source) read(p []byte) (n int, err error) {
	ctlErr := s.raw.Control(func(fd uintptr) {
		for {
			n, err = unix.Read(int(fd), p)
			if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	if ctlErr != nil {
		return 0, ctlErr
	}
	if errors.Is(err, unix.EAGAIN) {
		return 0, nil
	}
	return max(n, 0), err
}

// interrupt ends waiting, now and from now on.
func (s *source) interrupt() { _ = s.file.SetReadDeadline(time.Unix(1, 0)) }

// poke makes the end of the stream visible if no writer is left. A FIFO that was opened
// after its writers had gone would otherwise look as one whose writers are still to come.
// It must not be called before the shim has opened the FIFO.
func (s *source) poke() {
	if f, err := openFIFO(s.path, os.O_WRONLY); err == nil {
		_ = f.Close()
	}
}

func (s *source) close() error { return s.file.Close() }

// copyTo hands what comes to use, until the end of the stream or an interrupt; what is in
// the FIFO at an interrupt is handed over too, within a bound.
func (s *source) copyTo(use func(chunk []byte)) {
	for {
		err := s.wait()
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		n := s.readOnce(use)
		if err == nil {
			continue
		}
		for left := 64; left > 0 && n > 0; left-- {
			n = s.readOnce(use)
		}
		return
	}
}

// readOnce reads one chunk and hands it over.
func (s *source) readOnce(use func(chunk []byte)) int {
	buf, ok := chunks.Get().(*[]byte)
	if !ok {
		return 0
	}
	defer chunks.Put(buf)
	n, err := s.read(*buf)
	if err != nil || n == 0 {
		return 0
	}
	use((*buf)[:n])
	return n
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
