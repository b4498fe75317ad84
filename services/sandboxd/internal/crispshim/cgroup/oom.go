package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/cgroup/folder"
)

// OOMKills is how many processes of the group the kernel has killed for lack of memory; 0 if
// the group is gone.
func (g Group) OOMKills() uint64 {
	if g.Unified() {
		return table(g.dirs[""], "memory.events")["oom_kill"]
	}
	if dir, ok := g.dirs["memory"]; ok {
		return table(dir, "memory.oom_control")["oom_kill"]
	}
	return 0
}

// OOMWatch tells when the kernel kills for lack of memory in a group.
type OOMWatch struct {
	group Group
	file  *os.File
	done  chan struct{}
}

// WatchOOM calls notify each time the number of OOMKills has grown, until the group is gone
// or Close. Version 1 tells by an eventfd, version 2 by a change of memory.events.
func (g Group) WatchOOM(notify func(kills uint64)) (*OOMWatch, error) {
	var fd int
	var err error
	if g.Unified() {
		fd, err = inotify(filepath.Join(g.dirs[""], "memory.events"))
	} else {
		fd, err = eventfd(g.dirs["memory"])
	}
	if err != nil {
		return nil, fmt.Errorf("watch for lack of memory: %w", err)
	}
	w := &OOMWatch{group: g, file: os.NewFile(uintptr(fd), "oom"), done: make(chan struct{})}
	go w.run(notify)
	return w, nil
}

func (w *OOMWatch) run(notify func(uint64)) {
	defer close(w.done)
	var seen uint64
	buf := make([]byte, unix.SizeofInotifyEvent+unix.NAME_MAX+1)
	for {
		if _, err := w.file.Read(buf); err != nil {
			return
		}
		if kills := w.group.OOMKills(); kills > seen {
			seen = kills
			notify(kills)
		}
		// The removal of a group is told as well, and is the last that is told.
		if _, err := os.Lstat(w.group.memoryDir()); errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
}

func (g Group) memoryDir() string {
	if g.Unified() {
		return g.dirs[""]
	}
	return g.dirs["memory"]
}

// Close ends the watch; a call of notify in progress is waited for.
func (w *OOMWatch) Close() {
	_ = w.file.Close()
	<-w.done
}

// eventfd returns a descriptor that becomes readable at each lack of memory.
func eventfd(dir string) (int, error) {
	if dir == "" {
		return 0, fs.ErrNotExist
	}
	control, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err != nil {
		return 0, err
	}
	defer control.Close()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return 0, os.NewSyscallError("eventfd", err)
	}
	request := strconv.Itoa(fd) + " " + strconv.Itoa(int(control.Fd()))
	if err := folder.Write(filepath.Join(dir, "cgroup.event_control"), request); err != nil {
		return 0, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// inotify returns a descriptor that becomes readable when a file changes.
func inotify(path string) (int, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return 0, os.NewSyscallError("inotify_init1", err)
	}
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY|unix.IN_DELETE_SELF); err != nil {
		return 0, errors.Join(&fs.PathError{Op: "inotify", Path: path, Err: err}, unix.Close(fd))
	}
	return fd, nil
}
