package namespaces

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// OnThread runs f on an operating system thread of its own and ends the thread afterwards,
// so that whatever f does to the thread's namespaces reaches nobody else. It returns when f
// has returned. f must not start goroutines that rely on the thread's namespaces.
func OnThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the runtime ends a thread whose goroutine ends locked.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The runtime cannot end the process's first thread, and /proc/self shows that
			// thread's namespaces to everybody. While it is held here, the next goroutine
			// gets another one.
			done <- OnThread(f)
			runtime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}

// Enter runs f on a thread of its own inside the namespaces at the given paths; an empty
// path means the caller's namespace. See [OnThread].
func Enter(f func() error, paths ...string) error {
	return OnThread(func() error {
		for _, path := range paths {
			if path == "" {
				continue
			}
			if err := setns(path); err != nil {
				return err
			}
		}
		return f()
	})
}

func setns(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open namespace %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := unix.Setns(fd, 0); err != nil {
		return fmt.Errorf("enter namespace %s: %w", path, err)
	}
	return nil
}

// IsNamespace says whether a path is an open handle of a namespace: a bind mount of one or
// a link below /proc. A plain file that is left of an unmounted one is not.
func IsNamespace(path string) bool {
	if path == "" {
		return false
	}
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false
	}
	return st.Type == unix.NSFS_MAGIC
}
