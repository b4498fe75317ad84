//go:build integration

package controller_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// A task's output may go to a logging program, which the shim starts: it gets the outputs as
// descriptors 3 and 4, its arguments from the address and the container's id from the
// environment, says by closing descriptor 5 that it is ready, and has read all of the output
// when the task is deleted.
func TestLoggingProgram(t *testing.T) { eachShim(t, testLoggingProgram) }

func testLoggingProgram(t *testing.T, n *node) {
	t.Helper()
	program := filepath.Join(n.dir, "logger")
	text := "#!/bin/sh\nexec 5>&-\nprintf '%s\\n' \"$*\" \"$CONTAINER_NAMESPACE/$CONTAINER_ID\" >" + n.dir + "/said\n" +
		"cat <&4 >" + n.dir + "/errors &\ncat <&3 >" + n.dir + "/output\nwait\n"
	if err := os.WriteFile(program, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	sb, id := n.sandbox(), shimtest.ID()
	to := "binary://" + program + "?tag=blue"
	_, err := n.tasks.Create(t.Context(), port.TaskSpec{
		SandboxID: sb, ContainerID: id, Handler: n.handler, Rootfs: n.mounts(), Stdio: pod.Stdio{Stdout: to, Stderr: to},
		Spec: shimtest.Spec(t, sb, id, false, "/bin/sh", "-c", "seq 1 20000; echo oops >&2"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.tasks.Start(t.Context(), sb, id, ""); err != nil {
		t.Fatal(err)
	}
	if e, err := n.tasks.Wait(t.Context(), sb, id, ""); err != nil || e.Code != 0 {
		t.Errorf("%+v, %v", e, err)
	}
	if _, err := n.tasks.Delete(t.Context(), sb, id, ""); err != nil {
		t.Error(err)
	}
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(n.dir, name))
		if err != nil {
			t.Error(err)
		}
		return string(data)
	}
	if got := read("output"); strings.Count(got, "\n") != 20000 || !strings.HasSuffix(got, "\n20000\n") {
		t.Errorf("the output has %d lines and ends with %q", strings.Count(got, "\n"), got[max(0, len(got)-20):])
	}
	if got := read("errors"); got != "oops\n" {
		t.Errorf("the errors are %q", got)
	}
	if got, want := read("said"), "tag blue\nk8s.io/"+id+"\n"; got != want {
		t.Errorf("the program was started with %q, want %q", got, want)
	}
}
