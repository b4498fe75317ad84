//go:build integration

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/url"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// client is attached to a container.
type client struct {
	t   *testing.T
	in  *io.PipeWriter
	out *bufio.Reader
	// end is what the attaching ended with.
	end <-chan error
	// leave goes without a word.
	leave context.CancelFunc
}

// sizes hands out one size of a terminal.
type sizes chan remotecommand.TerminalSize

func (s sizes) Next() *remotecommand.TerminalSize {
	size, ok := <-s
	if !ok {
		return nil
	}
	return &size
}

// attach attaches to a container with its input and output.
func (s *system) attach(id string, tty bool, size *remotecommand.TerminalSize) *client {
	t := s.t
	t.Helper()
	answer, err := s.CRI.Attach(t.Context(), &criv1.AttachRequest{ContainerId: id, Stdin: true, Stdout: true, Stderr: !tty, Tty: tty})
	must(t, err)
	address, err := url.Parse(answer.GetUrl())
	must(t, err)
	executor, err := remotecommand.NewSPDYExecutor(&rest.Config{}, "POST", address)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	inRead, inWrite := io.Pipe()
	outRead, outWrite := io.Pipe()
	options := remotecommand.StreamOptions{Stdin: inRead, Stdout: outWrite, Tty: tty}
	if !tty {
		options.Stderr = io.Discard
	}
	queue := make(sizes, 1)
	if size != nil {
		queue <- *size
		options.TerminalSizeQueue = queue
	}
	end := make(chan error, 1)
	go func() {
		err := executor.StreamWithContext(ctx, options)
		close(queue)
		_ = outWrite.CloseWithError(io.EOF)
		end <- err
	}()
	return &client{t: t, in: inWrite, out: bufio.NewReader(outRead), end: end, leave: cancel}
}

// says types a line and reads until a line of the answer contains what is wanted.
func (c *client) says(line, want string) {
	c.t.Helper()
	if _, err := io.WriteString(c.in, line+"\n"); err != nil {
		c.t.Fatal(err)
	}
	for {
		got, err := c.out.ReadString('\n')
		if strings.Contains(got, want) {
			return
		}
		if err != nil {
			c.t.Fatalf("after %q: %v, want %q", line, err, want)
		}
	}
}

// ended waits for the end of the attaching.
func (c *client) ended() {
	c.t.Helper()
	select {
	case err := <-c.end:
		if err != nil {
			c.t.Errorf("attach: %v", err)
		}
	case <-time.After(20 * time.Second):
		c.t.Error("the attaching does not end")
	}
}

// Clients come and go, type and read; the last one's end of input is the container's only if
// the container wants it so.
func TestAttach(t *testing.T) { testenv.EachHandler(t, tellAttach) }

func tellAttach(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler})
	s.pull(busybox)
	pod, config := s.pod("attached")
	cfg := containerConfig("many", "cat")
	cfg.Stdin = true
	many := s.container(pod, config, cfg)
	for n := range 3 {
		c := s.attach(many, false, nil)
		c.says(fmt.Sprintf("line %d", n), fmt.Sprintf("line %d", n))
		must(t, c.in.Close())
		c.leave()
		<-c.end
	}
	if handler == testenv.HandlerCrisp {
		// The input is the shim's too; the stock shim's ends with sandboxd.
		must(t, s.Restart(t.Context(), testenv.Sandboxd))
	}
	a, b := s.attach(many, false, nil), s.attach(many, false, nil)
	// Who has an answer is attached.
	b.says("from b", "from b")
	a.says("from a", "from a")
	b.says("again", "from a")
	if state := s.status(many).GetState(); state != criv1.ContainerState_CONTAINER_RUNNING {
		t.Errorf("the container is %s", state)
	}
	_, err := s.CRI.StopContainer(t.Context(), &criv1.StopContainerRequest{ContainerId: many, Timeout: 0})
	must(t, err)
	go func() { _, _ = io.Copy(io.Discard, a.out) }()
	go func() { _, _ = io.Copy(io.Discard, b.out) }()
	a.ended()
	b.ended()
	lines := strings.Join(readLines(t, s.status(many).GetLogPath()), "\n")
	contains(t, lines, "stdout F line 0", "stdout F line 2", "stdout F from a", "stdout F from b")

	cfg = containerConfig("once", "cat; exit 5")
	cfg.Stdin, cfg.StdinOnce = true, true
	once := s.container(pod, config, cfg)
	c := s.attach(once, false, nil)
	c.says("only", "only")
	must(t, c.in.Close())
	if code := s.waitExit(once).GetExitCode(); code != 5 {
		t.Errorf("exit code %d, want 5", code)
	}
	c.ended()
}

// A terminal has a size, one stream, and a log.
func TestTerminal(t *testing.T) { testenv.EachHandler(t, tellTerminal) }

func tellTerminal(t *testing.T, handler string) {
	s := start(t, testenv.Setup{Handler: handler})
	s.pull(busybox)
	pod, config := s.pod("terminal")
	cfg := containerConfig("shell", "echo on a terminal; exec sh")
	cfg.Stdin, cfg.Tty = true, true
	id := s.container(pod, config, cfg)
	c := s.attach(id, true, &remotecommand.TerminalSize{Width: 123, Height: 45})
	eventually(t, "the terminal has its size", func() error {
		if got := s.exec(id, "sh", "-c", "stty size </proc/1/fd/0"); strings.TrimSpace(got) != "45 123" {
			return fmt.Errorf("size is %q", got)
		}
		return nil
	})
	c.says("tty && echo it is; echo err >&2", "it is")
	c.says("exit 6", "exit 6")
	if code := s.waitExit(id).GetExitCode(); code != 6 {
		t.Errorf("exit code %d, want 6", code)
	}
	c.ended()
	log := strings.Join(readLines(t, s.status(id).GetLogPath()), "\n")
	contains(t, log, "stdout F on a terminal", "/dev/", "it is", "err")
	if strings.Contains(log, " stderr ") {
		t.Errorf("a terminal has one stream: %s", log)
	}
}
