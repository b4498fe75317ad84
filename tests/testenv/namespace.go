package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/tests/fixture"
)

// insideVariable marks the copy of a program that runs in namespaces of its own.
const insideVariable = "CRISP_TEST_NAMESPACE"

// Runner is what has tests to run, as *testing.M has.
type Runner interface{ Run() int }

// Main runs a package's tests in a network and mount namespace of their own and
// gives the exit status. Without root the tests run where they are; those that
// start a System then skip themselves.
func Main(ctx context.Context, m Runner) int {
	if os.Getuid() != 0 {
		return m.Run()
	}
	status, err := Isolate(ctx, m.Run)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		return 1
	}
	return status
}

// Isolate calls run in a copy of the program that has a network and a mount
// namespace of its own: loopback is up, forwarding is on and all mounts are
// shared, as on a machine that systemd has set up. It needs root. What images are
// made of is fetched before, since inside there is no way out.
func Isolate(ctx context.Context, run func() int) (int, error) {
	if os.Getenv(insideVariable) != "" {
		if err := furnish(); err != nil {
			return 0, fmt.Errorf("set up the namespaces: %w", err)
		}
		return run(), nil
	}
	if kind := os.Getenv(nestedVariable); kind != "" {
		return nest(ctx, kind, os.Args[1:], os.Stdout)
	}
	if _, err := fixture.FindParts(ctx, fixture.PartsConfig{}); err != nil {
		return 0, fmt.Errorf("parts of images: %w", err)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), insideVariable+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// The kernel ends the copy when the thread that started it ends; so the thread
	// is kept, and the copy does not outlive a killed parent.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	// The terminal sends its signals to both; the copy is the one to act on them.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("enter namespaces: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case sig := <-signals:
			if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return 0, err
			}
		case err := <-ended:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return 0, err
			}
			return cmd.ProcessState.ExitCode(), nil
		}
	}
}

func furnish() error {
	// First private, so that nothing done here reaches the machine's namespace,
	// then shared among the processes and containers inside.
	for _, propagation := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.Mount("", "/", "", unix.MS_REC|propagation, ""); err != nil {
			return fmt.Errorf("mount propagation: %w", err)
		}
	}
	if os.Getenv(nestedVariable) != "" {
		if err := furnishNested(); err != nil {
			return err
		}
	}
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(loopback); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}
