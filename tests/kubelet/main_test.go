//go:build kubelet

package kubelet

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

const busybox = fixture.BusyboxImage

// nodeAddress is the node's address in the network of the tests.
const nodeAddress = "192.0.2.1"

// patience is how long a story waits for what must happen: kubelet itself waits for seconds between its steps.
const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	os.Exit(testenv.Main(context.Background(), m))
}

// images are made once for all stories.
var images = sync.OnceValues(func() ([]fixture.Image, error) {
	parts, err := fixture.FindParts(context.Background(), fixture.PartsConfig{})
	if err != nil {
		return nil, err
	}
	return fixture.Conformance(parts)
})

// furnish makes the namespaces of the test a node: what is written to /run and /var, by kubelet at
// fixed places too, stays in memory, and there is an address besides loopback's.
var furnish = sync.OnceValue(func() error {
	base, err := os.MkdirTemp("", "crisp-node-")
	if err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", base, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	for _, dir := range []string{"/run", "/var"} {
		upper, work := base+dir+"-upper", base+dir+"-work"
		for _, d := range []string{upper, work} {
			if err := os.Mkdir(d, 0o755); err != nil {
				return err
			}
		}
		options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", dir, upper, work)
		if err := unix.Mount("overlay", dir, "overlay", 0, options); err != nil {
			return fmt.Errorf("mount an overlay on %s: %w", dir, err)
		}
	}
	// A containerd of the machine is none of the test's node.
	if err := os.MkdirAll("/run/containerd", 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run/containerd", "tmpfs", 0, "mode=0711"); err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	// The folder's mount is hidden and ends with the namespace.
	if err := unix.Unmount(base, unix.MNT_DETACH); err != nil {
		return err
	}
	if err := os.Remove(base); err != nil {
		return err
	}
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(nodeAddress + "/32")
	if err != nil {
		return err
	}
	return netlink.AddrAdd(loopback, address)
})

// eventually polls until check succeeds.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	within(t, patience, what, check)
}

// within polls until check succeeds, so long.
func within(t *testing.T, limit time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
