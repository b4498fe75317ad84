package unixsock_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/crisp-cri/crisp/services/internal/unixsock"
)

// asChild makes the test binary the process that a service manager starts.
const asChild = "CRISP_TEST_ACTIVATED"

func TestMain(m *testing.M) {
	if os.Getenv(asChild) != "" {
		os.Exit(child())
	}
	os.Exit(m.Run())
}

// child takes the passed socket over and greets one client.
func child() int {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	lis, err := unixsock.Listen(ctx, unixsock.Config{Path: os.Getenv(asChild)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	conn, err := lis.Accept()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Fprint(conn, "hello")
	_ = conn.Close()
	return 0
}

func TestPassedSocketIsTakenOver(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	// The socket lies elsewhere than where the process would make its own: only the
	// passed descriptor leads to it.
	lis, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "passed.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lis.Close() }()
	file, err := lis.File()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	other, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$0"`, os.Args[0])
	cmd.Env = append(os.Environ(), "LISTEN_FDS=2", "LISTEN_FDNAMES=other:x.sock", asChild+"="+filepath.Join(dir, "x.sock"))
	cmd.ExtraFiles = []*os.File{other, file}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", filepath.Join(dir, "passed.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	buf := make([]byte, 5)
	if n, err := conn.Read(buf); err != nil || string(buf[:n]) != "hello" {
		t.Errorf("got %q, %v", buf[:n], err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "passed.sock")); err != nil {
		t.Errorf("the child removed the socket of the service manager: %v", err)
	}
}
