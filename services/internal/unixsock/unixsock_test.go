package unixsock_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

func TestListenSetsModeAndMakesFolder(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "run", "x.sock")
	lis, err := unixsock.Listen(t.Context(), unixsock.Config{
		Path: path, Mode: 0o660, Owner: strconv.Itoa(os.Getuid()), Group: strconv.Itoa(os.Getgid()),
	})
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o660 {
		t.Errorf("mode is %o", got)
	}
	if err := lis.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

func TestListenReplacesOnlyStaleSockets(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.sock")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	if err := stale.Close(); err != nil {
		t.Fatal(err)
	}
	lis, err := unixsock.Listen(t.Context(), unixsock.Config{Path: path})
	if err != nil {
		t.Fatalf("a stale socket is in the way: %v", err)
	}
	defer func() { _ = lis.Close() }()
	if _, err := unixsock.Listen(t.Context(), unixsock.Config{Path: path}); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("a served socket: got %v", err)
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the refused listener broke the first one: %v", err)
	}
	_ = conn.Close()
}

func TestSocketsOfOthersAreLeftAlone(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.sock")
	first, err := unixsock.Listen(t.Context(), unixsock.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	// Another program removes the socket and makes its own.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the other's socket: %v", err)
	}
	_ = conn.Close()
}

func TestListenRefuses(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		cfg  unixsock.Config
		want error
	}{
		"file":     {unixsock.Config{Path: file}, errdefs.ErrFailedPrecondition},
		"relative": {unixsock.Config{Path: "x.sock"}, errdefs.ErrInvalidArgument},
		"too long": {unixsock.Config{Path: "/" + strings.Repeat("x", 120)}, errdefs.ErrInvalidArgument},
	} {
		if _, err := unixsock.Listen(t.Context(), tc.cfg); !errors.Is(err, tc.want) {
			t.Errorf("%s: got %v, want %v", name, err, tc.want)
		}
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "precious" {
		t.Errorf("the file was touched: %q, %v", text, err)
	}
	_, err := unixsock.Listen(t.Context(), unixsock.Config{Path: filepath.Join(t.TempDir(), "x"), Group: "no-such-group"})
	if err == nil {
		t.Error("an unknown group was ignored")
	}
}

func TestPeerOf(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x.sock")
	lis, err := unixsock.Listen(t.Context(), unixsock.Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lis.Close() }()
	client, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	conn, err := lis.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	got, err := unixsock.PeerOf(conn)
	want := unixsock.Peer{PID: int32(os.Getpid()), UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	if err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	a, b := net.Pipe()
	defer func() { _ = a.Close() }()
	defer func() { _ = b.Close() }()
	if _, err := unixsock.PeerOf(a); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("a pipe has a peer: %v", err)
	}
}

func TestModeText(t *testing.T) {
	t.Parallel()
	var m unixsock.Mode
	if err := m.UnmarshalText([]byte("0660")); err != nil || m != 0o660 {
		t.Errorf("got %o, %v", m, err)
	}
	if text, err := m.MarshalText(); err != nil || string(text) != "0660" {
		t.Errorf("got %s, %v", text, err)
	}
	for _, bad := range []string{"", "rw", "0888", "7777"} {
		if err := m.UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q was accepted as %o", bad, m)
		}
	}
}

// A socket without its file, or with another in its place, cannot be reached any more.
func TestLost(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(path string) error{
		"removed": os.Remove,
		"replaced": func(path string) error {
			if err := os.WriteFile(path+".new", nil, 0o600); err != nil {
				return err
			}
			return os.Rename(path+".new", path)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "s")
			l, err := unixsock.Listen(t.Context(), unixsock.Config{Path: path})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			if unixsock.Lost(ctx, l) {
				t.Error("lost although it is there")
			}
			if err := lose(path); err != nil {
				t.Fatal(err)
			}
			if !unixsock.Lost(t.Context(), l) {
				t.Error("not lost although it is gone")
			}
		})
	}
}
