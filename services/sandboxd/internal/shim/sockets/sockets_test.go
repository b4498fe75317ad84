package sockets

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A start that outlives sandboxd may leave its socket after the sweep at the begin.
func TestSocketsThatComeLateAreSwept(t *testing.T) {
	dir, err := os.MkdirTemp("", "s") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		return l
	}
	used := listen("used")
	defer func() { _ = used.Close() }()
	_ = listen("stray").Close()
	New(dir, func() map[string]bool { return nil }).After(t.Context(), time.Millisecond)
	if _, err := os.Lstat(filepath.Join(dir, "stray")); !os.IsNotExist(err) {
		t.Errorf("stray socket: %v, want it gone", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "used")); err != nil {
		t.Errorf("socket that somebody listens on: %v", err)
	}
}
