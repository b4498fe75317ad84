//go:build integration && amd64

package faults

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// clockCode is machine code that answers clock_gettime from the kernel, and adds to the time of
// day what follows it:
//
//	mov eax, 228; syscall; test edi, edi; jne end; add qword [rsi], OFFSET; end: ret
func clockCode(offset time.Duration) []byte {
	code := []byte{0xb8, 228, 0, 0, 0, 0x0f, 0x05, 0x85, 0xff, 0x75, 0x07, 0x48, 0x81, 0x06}
	code = binary.LittleEndian.AppendUint32(code, uint32(int32(offset/time.Second)))
	return append(code, 0xc3)
}

// setClock makes the time of day of one process differ from the machine's. Programs read clocks
// without a system call, by code that the kernel maps into each process; a process whose copy of
// that code is overwritten is on a machine whose clock was set, while all others are not.
func setClock(t *testing.T, pid int, offset time.Duration) {
	t.Helper()
	must(t, syscall.Kill(pid, syscall.SIGSTOP))
	defer func() { must(t, syscall.Kill(pid, syscall.SIGCONT)) }()
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	must(t, err)
	defer func() { _ = memory.Close() }()
	from, to := mapping(t, pid, "[vdso]")
	image := make([]byte, to-from)
	_, err = io.ReadFull(io.NewSectionReader(memory, from, to-from), image)
	must(t, err)
	library, err := elf.NewFile(bytes.NewReader(image))
	must(t, err)
	symbols, err := library.DynamicSymbols()
	must(t, err)
	at := slices.IndexFunc(symbols, func(s elf.Symbol) bool { return s.Name == "__vdso_clock_gettime" })
	if at < 0 {
		t.Fatal("the kernel maps no clock")
	}
	code, place := clockCode(offset), from+int64(symbols[at].Value)
	eventually(t, 30*time.Second, "no thread is in the code", func() error {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
		for _, task := range tasks {
			var text []byte
			text, err = os.ReadFile(task)
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
				continue
			}
			if err != nil {
				break
			}
			fields := strings.Fields(string(text))
			counter, failed := strconv.ParseInt(strings.TrimPrefix(fields[len(fields)-1], "0x"), 16, 64)
			if failed != nil || counter >= place && counter < place+int64(len(code)) {
				_ = syscall.Kill(pid, syscall.SIGCONT)
				time.Sleep(time.Millisecond)
				return errors.Join(fmt.Errorf("thread is at %q", text), syscall.Kill(pid, syscall.SIGSTOP))
			}
		}
		return err
	})
	_, err = memory.WriteAt(code, place)
	must(t, err)
}

// mapping is where something is mapped in a process.
func mapping(t *testing.T, pid int, name string) (from, to int64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if strings.HasSuffix(strings.TrimSpace(line), name) {
			if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err == nil {
				return from, to
			}
		}
	}
	t.Fatalf("process %d has no %s", pid, name)
	return 0, 0
}

// A clock that is set, back, forward, or to the beginning of time, ends no time limit early or
// late; no end comes before its beginning, the next attempt of what is of the future can be made,
// and nothing that was remembered is out of date, over restarts too.
func TestClockThatIsSet(t *testing.T) {
	s := start(t, testenv.Setup{})
	config := s.podConfig("clocks")
	pod := s.pod(config, "")
	shim := s.shimOf(pod)
	everything := []testenv.Process{testenv.EventBus, testenv.Sandboxd, testenv.NRIHub, testenv.Gateway}
	set := func(offset time.Duration) {
		for _, p := range everything {
			setClock(t, s.Pid(p), offset)
		}
		setClock(t, shim, offset)
	}
	inOrder := func(when, id string) {
		t.Helper()
		st := s.waitExit(id, 30*time.Second)
		if st.GetCreatedAt() <= 0 || st.GetStartedAt() < st.GetCreatedAt() || st.GetFinishedAt() < st.GetStartedAt() {
			t.Errorf("%s, %s: created %d, started %d, finished %d", when, st.GetMetadata().GetName(), st.GetCreatedAt(), st.GetStartedAt(), st.GetFinishedAt())
		}
	}
	var attempt uint32
	for _, jump := range []struct {
		name   string
		offset time.Duration
	}{
		{"an hour back", -time.Hour},
		{"two hours forward", time.Hour},
		{"1970", -time.Since(time.Unix(3600, 0))},
	} {
		stubborn := s.container(pod, config, script("stubborn"+strconv.Itoa(int(attempt)), "trap '' TERM; while :; do sleep 0.1; done"))
		dies := s.container(pod, config, script("dies"+strconv.Itoa(int(attempt)), "sleep 1000"))
		again := script("again", "exit 4")
		again.Metadata.Attempt = attempt
		first := s.container(pod, config, again)
		s.waitExit(first, 20*time.Second)
		answer, err := s.CRI.Exec(t.Context(), &criv1.ExecRequest{ContainerId: dies, Cmd: []string{"echo", "streamed"}, Stdout: true})
		must(t, err)

		set(jump.offset)
		address, err := url.Parse(answer.GetUrl())
		must(t, err)
		executor, err := transports()["WebSocket"](address)
		must(t, err)
		var out bytes.Buffer
		if err := executor.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: &out}); err != nil || out.String() != "streamed\n" {
			t.Errorf("%s: stream whose address was given before: %q, %v", jump.name, out.String(), err)
		}
		for what, call := range map[string]func() error{
			"stop": func() error { return s.stopContainer(stubborn, 1) },
			"command": func() error {
				_, err := s.CRI.ExecSync(t.Context(), &criv1.ExecSyncRequest{ContainerId: dies, Cmd: []string{"sleep", "1000"}, Timeout: 1})
				if !oneOf(err, codes.DeadlineExceeded) {
					return fmt.Errorf("%w, want DeadlineExceeded", err)
				}
				return nil
			},
		} {
			begun := time.Now()
			err := call()
			if took := time.Since(begun); err != nil || took < time.Second || took > 30*time.Second {
				t.Errorf("%s: %s took %s: %v", jump.name, what, took, err)
			}
		}
		must(t, syscall.Kill(s.firstProcess(dies), syscall.SIGKILL))
		inOrder(jump.name, dies)
		inOrder(jump.name, stubborn)
		attempt++
		next := script("again", "exit 5")
		next.Metadata.Attempt = attempt
		id := s.container(pod, config, next)
		inOrder(jump.name, id)
		if at := time.Since(time.Unix(0, s.status(id).GetCreatedAt())) + jump.offset; at.Abs() > 5*time.Minute {
			t.Errorf("%s: a container was created %s away from that", jump.name, at)
		}
		attempt++
		must(t, s.Restart(t.Context(), testenv.Sandboxd))
		setClock(t, s.Pid(testenv.Sandboxd), jump.offset)
		inOrder(jump.name, first)
		list, err := s.CRI.ListContainers(t.Context(), &criv1.ListContainersRequest{})
		must(t, err)
		if n := len(list.GetContainers()); n != 4 {
			t.Errorf("%s: %d containers are listed, want 4", jump.name, n)
		}
		for _, c := range list.GetContainers() {
			must(t, s.removeContainer(c.GetId()))
		}
		if state := s.podStatus(pod).GetState(); state != criv1.PodSandboxState_SANDBOX_READY {
			t.Errorf("%s: the pod is %s", jump.name, state)
		}
		set(0)
	}
	must(t, errors.Join(s.stopPod(pod), s.removePod(pod)))
}
