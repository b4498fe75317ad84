//go:build integration

package faults

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	clientexec "k8s.io/client-go/util/exec"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// transports are the ways in which clients stream.
func transports() map[string]func(*url.URL) (remotecommand.Executor, error) {
	return map[string]func(*url.URL) (remotecommand.Executor, error){
		"SPDY": func(u *url.URL) (remotecommand.Executor, error) {
			return remotecommand.NewSPDYExecutor(&rest.Config{}, http.MethodPost, u)
		},
		"WebSocket": func(u *url.URL) (remotecommand.Executor, error) {
			return remotecommand.NewWebSocketExecutor(&rest.Config{}, http.MethodGet, u.String())
		},
	}
}

// stream runs a command of a container with a client's streams.
func (s *system) stream(dial func(*url.URL) (remotecommand.Executor, error), id string, options remotecommand.StreamOptions, command ...string) error {
	s.t.Helper()
	answer, err := s.CRI.Exec(s.t.Context(), &criv1.ExecRequest{
		ContainerId: id, Cmd: command, Tty: options.Tty,
		Stdin: options.Stdin != nil, Stdout: options.Stdout != nil, Stderr: options.Stderr != nil,
	})
	must(s.t, err)
	address, err := url.Parse(answer.GetUrl())
	must(s.t, err)
	executor, err := dial(address)
	must(s.t, err)
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*time.Minute)
	defer cancel()
	return executor.StreamWithContext(ctx, options)
}

// resident is the memory of a process in bytes.
func resident(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	must(t, err)
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	must(t, err)
	return pages * os.Getpagesize()
}

// A client that goes without a word while the container is silent leaves nothing behind, and
// addresses that nobody opens are no burden.
func TestClientsOfASilentContainerLeaveNothing(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("silent")
	pod := s.pod(config, "")
	quiet := script("quiet", "trap '' TERM; while :; do sleep 1000; done")
	quiet.Stdin = true
	id := s.container(pod, config, quiet)
	shim := s.shimOf(pod)
	held := func() [3]int {
		return [3]int{descriptors(t, s.Pid(testenv.Gateway)), descriptors(t, s.Pid(testenv.Sandboxd)), descriptors(t, shim)}
	}
	attach := func() *url.URL {
		answer, err := s.CRI.Attach(t.Context(), &criv1.AttachRequest{ContainerId: id, Stdin: true, Stdout: true, Stderr: true})
		must(t, err)
		address, err := url.Parse(answer.GetUrl())
		must(t, err)
		return address
	}
	before := held()
	for range scaled(t, 60) {
		attach() // never opened
		address := attach()
		conn, err := net.Dial("tcp", address.Host)
		must(t, err)
		_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n", address.RequestURI())
		must(t, err)
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Fatalf("no answer to the upgrade: %v", err)
		}
		must(t, conn.Close())
	}
	settled := func() error {
		now := held()
		for i := range now {
			if now[i] > before[i]+5 {
				return fmt.Errorf("open files of gateway, sandboxd and shim: %v became %v", before, now)
			}
		}
		return nil
	}
	eventually(t, time.Minute, "the clients' streams are closed", settled)
	must(t, s.stopContainer(id, 1))
	s.waitExit(id, patience)
}

// Output beyond the limit is thrown away and costs no memory.
func TestEndlessOutputIsCut(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("loud")
	pod := s.pod(config, "")
	id := s.container(pod, config, script("main", "sleep 1000"))
	const limit = 16 << 20
	run := func(text string, seconds int64) (*criv1.ExecSyncResponse, error) {
		return s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{ContainerId: id, Cmd: []string{"sh", "-c", text}, Timeout: seconds},
			grpc.MaxCallRecvMsgSize(40<<20))
	}
	for name, test := range map[string]struct {
		command  string
		out, err int
	}{
		"standard output":    {"head -c 60000000 /dev/zero; exit 3", limit, 0},
		"standard error":     {"head -c 60000000 /dev/zero >&2; exit 3", 0, limit},
		"both, at the limit": {"head -c 16777216 /dev/zero; head -c 16777216 /dev/zero >&2; exit 3", limit, limit},
	} {
		answer, err := run(test.command, 100)
		if err != nil || len(answer.GetStdout()) != test.out || len(answer.GetStderr()) != test.err || answer.GetExitCode() != 3 {
			t.Errorf("%s: %d and %d bytes, exit code %d, %v", name, len(answer.GetStdout()), len(answer.GetStderr()), answer.GetExitCode(), err)
		}
	}
	if _, err := run("yes", 1); !oneOf(err, codes.DeadlineExceeded) {
		t.Errorf("a command that never ends: %v", err)
	}
	most := 0
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if _, err := run("head -c 100000000 /dev/zero", 100); err != nil {
				t.Error(err)
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for watching := true; watching; {
		select {
		case <-done:
			watching = false
		case <-time.After(20 * time.Millisecond):
			most = max(most, resident(t, s.Pid(testenv.Sandboxd)), resident(t, s.Pid(testenv.Gateway)))
		}
	}
	t.Logf("most memory of a process: %d MiB", most>>20)
	if most > 700<<20 {
		t.Errorf("a process grew to %d MiB", most>>20)
	}
}

// Both transports carry all bytes, the end of the input and the outcome.
func TestTransportsAgree(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("transports")
	pod := s.pod(config, "")
	id := s.container(pod, config, script("main", "sleep 1000"))
	data := make([]byte, scaled(t, 8<<20))
	_, err := rand.Read(data)
	must(t, err)
	want := fmt.Sprintf("%x", sha256.Sum256(data))
	for name, dial := range transports() {
		t.Run(name, func(t *testing.T) {
			var out, problems bytes.Buffer
			err := s.stream(dial, id, remotecommand.StreamOptions{Stdin: bytes.NewReader(data), Stdout: &out, Stderr: &problems}, "sha256sum")
			if err != nil || !strings.HasPrefix(out.String(), want) {
				t.Errorf("sum of the input: %v, %q, %q, want %s", err, out.String(), problems.String(), want)
			}
			for _, outcome := range []struct {
				command string
				code    int
			}{{"exit 7", 7}, {"kill -9 $$", 137}, {"true", 0}} {
				err := s.stream(dial, id, remotecommand.StreamOptions{Stdout: io.Discard, Stderr: io.Discard}, "sh", "-c", outcome.command)
				var exit clientexec.CodeExitError
				if got := errors.As(err, &exit); (outcome.code == 0) != (err == nil) || got && exit.Code != outcome.code || !got && outcome.code != 0 {
					t.Errorf("%s: %v, want %d", outcome.command, err, outcome.code)
				}
			}
			err = s.stream(dial, id, remotecommand.StreamOptions{Stdout: io.Discard, Stderr: io.Discard}, "/does/not/exist")
			if err == nil || !strings.Contains(err.Error(), "/does/not/exist") {
				t.Errorf("a command that does not exist: %v", err)
			}
		})
	}
}

// Nothing of the output is lost at the end, in order, however the command is run.
func TestOutputIsCompleteAtTheEnd(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("complete")
	pod := s.pod(config, "")
	id := s.container(pod, config, script("main", "sleep 1000"))
	const lines = 50000
	var want strings.Builder
	for i := range lines {
		fmt.Fprintf(&want, "%d\n", i+1)
	}
	command := []string{"seq", "1", strconv.Itoa(lines)}
	for range scaled(t, 5) {
		if out, code, err := s.exec(id, command...); err != nil || code != 0 || out != want.String() {
			t.Fatalf("ExecSync: %d of %d bytes, exit code %d, %v", len(out), want.Len(), code, err)
		}
		for name, dial := range transports() {
			for _, tty := range []bool{false, true} {
				var out bytes.Buffer
				err := s.stream(dial, id, remotecommand.StreamOptions{Stdout: &out, Tty: tty}, command...)
				if got := strings.ReplaceAll(out.String(), "\r\n", "\n"); err != nil || got != want.String() {
					t.Fatalf("%s, terminal %t: %d of %d bytes, %v", name, tty, len(got), want.Len(), err)
				}
			}
		}
	}
	// A child that is left behind and holds the output keeps nobody waiting, and what it writes
	// soon is not lost.
	begun := time.Now()
	out, code, err := s.exec(id, "sh", "-c", "(sleep 0.5; echo late; exec sleep 1234) & echo early; exit 3")
	if err != nil || code != 3 || out != "early\nlate\n" || time.Since(begun) > 15*time.Second {
		t.Errorf("child that is left behind: %q, exit code %d, %v after %s", out, code, err, time.Since(begun))
	}
	// With a time limit it is that, at the most, and the command that ended in time has not failed.
	configRunc := s.podConfig("complete-runc")
	for _, id := range []string{id, s.container(s.pod(configRunc, "runc"), configRunc, script("main", "sleep 1000"))} {
		begun := time.Now()
		answer, err := s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{
			ContainerId: id, Cmd: []string{"sh", "-c", "sleep 1234 & echo early; exit 3"}, Timeout: 2,
		})
		took := time.Since(begun)
		if err != nil || answer.GetExitCode() != 3 || string(answer.GetStdout()) != "early\n" || took > 5*time.Second {
			t.Errorf("child that is left behind, time limit of 2 s: %v, %v after %s", answer, err, took)
		}
		// What was written in the last moment is complete.
		answer, err = s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{
			ContainerId: id, Cmd: []string{"sh", "-c", "sleep 0.9; head -c 8000000 /dev/zero"}, Timeout: 1,
		})
		if err == nil && len(answer.GetStdout()) != 8000000 || err != nil && status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("command that ends with its time: %d bytes, %v", len(answer.GetStdout()), err)
		}
		// So it is with a command that is killed because its time is up.
		begun = time.Now()
		_, err = s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{
			ContainerId: id, Cmd: []string{"sh", "-c", "sleep 1234 & sleep 1234"}, Timeout: 2,
		})
		if took := time.Since(begun); status.Code(err) != codes.DeadlineExceeded || took > 5*time.Second {
			t.Errorf("command that is killed and leaves a child behind: %v after %s", err, took)
		}
	}
	// The end of a container is the end of its children; what was written before is in the log.
	late := s.container(pod, config, script("late", "(sleep 2; echo late) & echo early"))
	s.waitExit(late, patience)
	text, err := os.ReadFile(s.status(late).GetLogPath())
	must(t, err)
	if !strings.Contains(string(text), " stdout F early\n") {
		t.Errorf("log: %q", text)
	}
}

// sizes hands out sizes of a terminal without end.
type sizes struct{ n int }

func (s *sizes) Next() *remotecommand.TerminalSize {
	s.n++
	if s.n > 100 {
		return nil
	}
	return &remotecommand.TerminalSize{Width: uint16(s.n), Height: uint16(s.n)}
}

// Sizes of a terminal whose command never ran are no burden.
func TestSizesOfFailedCommandsAreForgotten(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("sizes")
	pod := s.pod(config, "")
	id := s.container(pod, config, script("main", "sleep 1000"))
	before := descriptors(t, s.Pid(testenv.Gateway))
	for range scaled(t, 15) {
		for name, dial := range transports() {
			var in bytes.Buffer
			err := s.stream(dial, id, remotecommand.StreamOptions{Stdin: &in, Stdout: io.Discard, Tty: true, TerminalSizeQueue: &sizes{}}, "/does/not/exist")
			if err == nil {
				t.Fatalf("%s: a command that does not exist ran", name)
			}
		}
	}
	eventually(t, patience, "streams are closed", func() error {
		if now := descriptors(t, s.Pid(testenv.Gateway)); now > before+5 {
			return fmt.Errorf("%d open files became %d", before, now)
		}
		return nil
	})
	var out bytes.Buffer
	err := s.stream(transports()["SPDY"], id, remotecommand.StreamOptions{Stdout: &out, Tty: true, TerminalSizeQueue: &last{{Width: 80, Height: 24}}},
		"sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do [ \"$(stty size 2>/dev/null)\" = '24 80' ] && break; sleep 0.3; done; stty size")
	if err != nil || strings.TrimSpace(out.String()) != "24 80" {
		t.Errorf("size of the terminal: %q, %v", out.String(), err)
	}
}

type last []remotecommand.TerminalSize

func (l *last) Next() *remotecommand.TerminalSize {
	if len(*l) == 0 {
		return nil
	}
	next := (*l)[0]
	*l = (*l)[1:]
	return &next
}
