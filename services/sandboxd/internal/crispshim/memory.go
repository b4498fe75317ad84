package crispshim

import (
	"bytes"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// quietTime is how long there must have been no call before memory is given back.
const quietTime = time.Second

// trimmer gives memory back to the system when the shim has nothing to do. It costs no
// goroutine while there is nothing to do.
type trimmer struct {
	// mu guards the rest.
	mu     sync.Mutex
	timer  *time.Timer
	closed bool
}

func newTrimmer() *trimmer { return &trimmer{} }

// touch notes that there is work.
func (t *trimmer) touch() {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
	case t.timer == nil:
		t.timer = time.AfterFunc(quietTime, giveBack)
	default:
		t.timer.Reset(quietTime)
	}
}

// close ends the giving back.
func (t *trimmer) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	if t.timer != nil {
		t.timer.Stop()
	}
}

// giveBack returns the free part of the heap, and the pages of the program itself: most of
// them served the start only, and those that are needed come back from the page cache.
func giveBack() {
	debug.FreeOSMemory()
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return
	}
	for line := range bytes.Lines(maps) {
		start, size, ok := constantMapping(line, self)
		if ok {
			// Advice only; a kernel that does not take it changes nothing.
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, start, size, unix.MADV_DONTNEED)
		}
	}
}

// constantMapping finds in a line of /proc/self/maps a part of the program that cannot be
// written to, so that dropping its pages loses nothing.
func constantMapping(line []byte, program string) (start, size uintptr, ok bool) {
	fields := bytes.Fields(line)
	if len(fields) != 6 || string(fields[5]) != program || bytes.IndexByte(fields[1], 'w') >= 0 {
		return 0, 0, false
	}
	low, high, found := bytes.Cut(fields[0], []byte{'-'})
	if !found {
		return 0, 0, false
	}
	from, err := strconv.ParseUint(string(low), 16, 64)
	if err != nil {
		return 0, 0, false
	}
	to, err := strconv.ParseUint(string(high), 16, 64)
	if err != nil || to <= from {
		return 0, 0, false
	}
	return uintptr(from), uintptr(to - from), true
}
