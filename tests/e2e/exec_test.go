//go:build integration

package e2e

import (
	"bytes"
	"context"
	"errors"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	clientexec "k8s.io/client-go/util/exec"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

func readLines(t *testing.T, path string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return strings.Split(strings.TrimRight(string(data), "\n"), "\n")
}

func TestExecSyncGivesOutputAndExitCode(t *testing.T) {
	testenv.EachHandler(t, tellExecSync)
}

func tellExecSync(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler})
	s.pull(busybox)
	pod, config := s.pod("exec")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))

	answer, err := s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", "echo out; echo err >&2; exit 42"}, Timeout: 20})
	must(t, err)
	if string(answer.GetStdout()) != "out\n" || string(answer.GetStderr()) != "err\n" || answer.GetExitCode() != 42 {
		t.Errorf("ExecSync = %q, %q, %d", answer.GetStdout(), answer.GetStderr(), answer.GetExitCode())
	}
	begin := time.Now()
	_, err = s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{ContainerId: id, Cmd: []string{"sleep", "100"}, Timeout: 1})
	if err == nil || time.Since(begin) > 10*time.Second {
		t.Errorf("ExecSync beyond its time: %v after %s", err, time.Since(begin))
	}
	if left := s.exec(id, "pgrep", "sleep"); strings.Count(left, "\n") != 1 { // the container's own
		t.Errorf("the command that ran out of time still runs: %q", left)
	}
}

func TestStreamedExecCarriesInputOutputAndExitCode(t *testing.T) {
	testenv.EachHandler(t, tellStreamedExec)
}

func tellStreamedExec(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler})
	s.pull(busybox)
	pod, config := s.pod("stream")
	id := s.container(pod, config, containerConfig("main", "sleep 1000"))

	run := func(command []string, stdin string) (string, string, error) {
		answer, err := s.CRI.Exec(t.Context(), &criv1.ExecRequest{ContainerId: id, Cmd: command, Stdin: true, Stdout: true, Stderr: true})
		must(t, err)
		address, err := url.Parse(answer.GetUrl())
		must(t, err)
		executor, err := remotecommand.NewSPDYExecutor(&rest.Config{}, "POST", address)
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var out, problem bytes.Buffer
		err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &problem})
		return out.String(), problem.String(), err
	}

	out, problem, err := run([]string{"sh", "-c", "cat; echo to stderr >&2"}, "typed\n")
	if out != "typed\n" || problem != "to stderr\n" || err != nil {
		t.Errorf("streamed exec = %q, %q, %v", out, problem, err)
	}
	_, _, err = run([]string{"sh", "-c", "exit 5"}, "")
	var exit clientexec.CodeExitError
	if !errors.As(err, &exit) || exit.Code != 5 {
		t.Errorf("streamed exec of a failing command = %v, want exit code 5", err)
	}
}
