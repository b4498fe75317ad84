//go:build integration

package controller_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// hangOn makes the OCI runtime of the node's next sandboxes hang in a command. It returns a file
// that gets a line whenever that is reached.
func (n *node) hangOn(command string) string {
	n.t.Helper()
	reached, wrapper := filepath.Join(n.dir, "reached"), filepath.Join(n.dir, "runtime")
	script := fmt.Sprintf("#!/bin/sh\nfor a in \"$@\"; do [ \"$a\" != %s ] || { echo >>%s; exec sleep 1000; }; done\nexec %s \"$@\"\n",
		command, reached, n.handler.BinaryName)
	if err := os.WriteFile(wrapper, []byte(script), 0o700); err != nil {
		n.t.Fatal(err)
	}
	n.handler.BinaryName = wrapper
	return reached
}

// passed lists what shims pass to OCI runtimes that lies in the folders of the node: descriptions
// of execs that hold a text, and sockets of terminals.
func (n *node) passed(text string) (descriptions, sockets []string) {
	n.t.Helper()
	err := filepath.WalkDir(n.dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && path == n.dir:
			return err
		case err != nil: // gone meanwhile
		case d.Name() == "pty.sock":
			sockets = append(sockets, path)
		case d.Type().IsRegular():
			if data, err := os.ReadFile(path); err == nil && strings.Contains(string(data), text) {
				descriptions = append(descriptions, path)
			}
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return descriptions, sockets
}

// What a shim has passed to its OCI runtime when it is killed, an exec's environment among it,
// lies in the pod's folders and goes with them.
func TestKilledDuringExec(t *testing.T) { eachShim(t, testKilledDuringExec) }

func testKilledDuringExec(t *testing.T, n *node) {
	t.Helper()
	reached := n.hangOn("exec")
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	secret := "SECRET=" + shimtest.ID()
	var starts sync.WaitGroup
	for _, terminal := range []bool{false, true} {
		process := shimtest.Process("/bin/true")
		process.Env, process.Terminal = append(process.Env, secret), terminal
		execID := shimtest.ID()
		x, err := n.io.OpenExec(t.Context(), id, execID, terminal, pod.Streams{})
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		if err := n.tasks.Exec(t.Context(), sb, id, port.ExecSpec{ID: execID, Process: process, Stdio: x.Stdio()}); err != nil {
			t.Fatal(err)
		}
		starts.Go(func() {
			if _, err := n.tasks.Start(t.Context(), sb, id, execID); err == nil {
				t.Error("an exec was started without its shim")
			}
		})
	}
	deadline := time.Now().Add(testkit.Patience)
	for data := []byte(nil); len(data) < 2; data, _ = os.ReadFile(reached) {
		if time.Now().After(deadline) {
			t.Fatal("the execs do not reach the runtime")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if execs, sockets := n.passed(secret); len(execs) != 2 || len(sockets) != 1 {
		t.Errorf("in the pod's folders: %v, %v, want two descriptions and a socket", execs, sockets)
	}
	i, err := n.shims.Get(sb)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(int(i.Status().Pid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	starts.Wait()
	<-i.Ended()
	if err := n.ctl.Shutdown(t.Context(), sb); err != nil {
		t.Error(err)
	}
	if err := n.io.Close(t.Context(), id); err != nil {
		t.Error(err)
	}
	if execs, sockets := n.passed(secret); len(execs)+len(sockets) > 0 {
		t.Errorf("left: %v, %v", execs, sockets)
	}
}
