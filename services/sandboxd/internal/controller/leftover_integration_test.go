//go:build integration

package controller_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// state is the folder of the OCI runtime for a container.
func (n *node) state(id string) string { return filepath.Join(n.handler.Root, "k8s.io", id) }

// clear removes what shims left of a container, by what a record knows of it.
func (n *node) clear(id string) error {
	return n.tasks.Clear(n.t.Context(), n.handler, id, "/"+shimtest.Group()+"/"+id)
}

// leftOf lists what is left of a container outside of bundles.
func (n *node) leftOf(id string) []string {
	left, _ := filepath.Glob(n.state(id))
	return append(left, shimtest.Groups(id)...)
}

// The state of the OCI runtime that cannot be removed is neither forgotten nor taken for
// removed, whatever the runtime and its shim say.
func TestStateThatCannotBeRemoved(t *testing.T) { eachShim(t, testStateThatCannotBeRemoved) }

func testStateThatCannotBeRemoved(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	place := filepath.Join(n.state(id), "obstacle")
	if err := errors.Join(os.Mkdir(place, 0o700), unix.Mount("tmpfs", place, "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	release := func() { _ = unix.Unmount(place, unix.MNT_DETACH) }
	t.Cleanup(release)
	if _, err := n.tasks.Wait(t.Context(), sb, id, ""); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		_, deleteErr := n.tasks.Delete(t.Context(), sb, id, "")
		if deleteErr != nil && !errdefs.IsNotFound(deleteErr) {
			continue // told
		}
		if err := n.clear(id); !errdefs.IsUnavailable(err) {
			t.Errorf("delete %v, then clear %v", deleteErr, err)
		}
	}
	release()
	if _, err := n.tasks.Delete(t.Context(), sb, id, ""); err != nil && !errdefs.IsNotFound(err) {
		t.Errorf("delete after the obstacle: %v", err)
	}
	if err := n.clear(id); err != nil {
		t.Errorf("clear after the obstacle: %v", err)
	}
	if left := n.leftOf(id); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if err := n.io.Close(t.Context(), id); err != nil {
		t.Error(err)
	}
}

// A shim that does not answer holds up the deletion of a container no longer than it takes to
// find that out, and the other containers of its pod live on.
func TestDeleteBehindADeafShim(t *testing.T) { eachShim(t, testDeleteBehindADeafShim) }

func testDeleteBehindADeafShim(t *testing.T, n *node) {
	t.Helper()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	other, err := n.container(sb, port.IOSpec{}, "/bin/sh", "-c", "sleep 1000")
	if err != nil {
		t.Fatal(err)
	}
	st, err := n.ctl.Status(t.Context(), sb, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(int(st.ShimPid), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	resume := func() { _ = syscall.Kill(int(st.ShimPid), syscall.SIGCONT) }
	t.Cleanup(resume)
	// Its threads stop one by one, and the last of them could still do what is asked below.
	eventually(t, func() bool { return stopped(st.ShimPid) })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	began := time.Now()
	if err := n.tasks.Kill(ctx, sb, id, "", syscall.SIGKILL, true); err != nil {
		t.Fatal(err)
	}
	if e, err := n.tasks.Wait(ctx, sb, id, ""); err != nil || e.Code != 137 {
		t.Errorf("wait: %+v, %v", e, err)
	}
	// Two at once, as when a removal meets the follower of the end.
	second := make(chan error, 1)
	go func() {
		_, err := n.tasks.Delete(ctx, sb, id, "")
		second <- err
	}()
	_, err = n.tasks.Delete(ctx, sb, id, "")
	errs := []error{err, <-second}
	if (errs[0] == nil) == (errs[1] == nil) || !errdefs.IsNotFound(errors.Join(errs...)) {
		t.Errorf("deletions: %v, want one that works and one that finds nothing", errs)
	}
	if took := time.Since(began); took > 25*time.Second {
		t.Errorf("took %s", took)
	}
	if err := n.io.Close(t.Context(), id); err != nil {
		t.Error(err)
	}
	if left := n.leftOf(id); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	resume()
	if st, err := n.tasks.State(ctx, sb, other, ""); err != nil || st.Status != "running" {
		t.Errorf("the other container: %+v, %v", st, err)
	}
	n.kill(sb, other)
}
