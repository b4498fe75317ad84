//go:build kubelet

package kubelet

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
)

// What kubelet's server does with containers for kubectl works through it.
func TestServer(t *testing.T) { //nolint:tparallel // Nodes take turns, since a kubelet has ports.
	n := start(t, options{expected: []string{"need criu"}})
	must(t, n.write(talkative()))
	t.Cleanup(func() { n.story(t).remove("server") })
	n.story(t).wait("server", ready)
	n.stories(t, map[string]func(*story){
		"logs": containerLogs, "exec": execs, "attach": attaches, "port-forward": forwards, "checkpoint": checkpoints,
	})
}

// talkative is a pod with containers to talk to.
func talkative() *corev1.Pod {
	echo := shell("echo", "while read line; do echo \"said $line\"; done")
	echo.Stdin = true
	terminal := shell("terminal", "while read line; do echo \"said $line\"; done")
	terminal.Stdin, terminal.TTY = true, true
	web := corev1.Container{Name: "web", Image: "registry.k8s.io/e2e-test-images/nginx:1.14-2", ImagePullPolicy: corev1.PullIfNotPresent}
	return pod("server", shell("main", "for i in 1 2 3 4 5; do echo line $i; done; sleep 1; echo problem >&2; while sleep 0.2; do test -e /more && echo more && rm /more; done"), echo, terminal, web)
}

func containerLogs(s *story) {
	all := "line 1\nline 2\nline 3\nline 4\nline 5\n"
	s.wantLogs("server", "main", "tailLines=1", "problem\n")
	s.wantLogs("server", "main", "", all+"problem\n")
	s.wantLogs("server", "main", "limitBytes=9", all[:9])
	text, err := s.logs("server", "main", "timestamps=true&tailLines=2")
	must(s.t, err)
	for line := range strings.Lines(text) {
		word, _, _ := strings.Cut(line, " ")
		if _, err := time.Parse(time.RFC3339Nano, word); err != nil {
			s.t.Errorf("line %q has no time: %v", line, err)
		}
	}
	s.wantLogs("server", "main", "sinceTime="+url.QueryEscape(time.Now().Add(time.Hour).Format(time.RFC3339)), "")
	// Who follows gets what comes later.
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s/containerLogs/%s/%s/main?follow=true&tailLines=1", server, namespace, podName("server")), nil)
	must(s.t, err)
	answer, err := client.Do(request)
	must(s.t, err)
	defer func() { _ = answer.Body.Close() }()
	lines := bufio.NewReader(answer.Body)
	for _, want := range []string{"problem\n", "more\n", "more\n"} {
		if got, err := lines.ReadString('\n'); got != want {
			s.t.Errorf("followed %q, %v, want %q", got, err, want)
		}
		s.do("server", "main", "touch", "/more")
	}
}

func execs(s *story) {
	for _, over := range []transport{overWebSocket, overSPDY} {
		s.t.Run(string(over), func(t *testing.T) {
			s := s.story(t)
			out, err := s.exec(over, "server", "main", "typed\n", "sh", "-c", "cat; echo done")
			if err != nil || out != "typed\ndone\n" {
				t.Errorf("said %q, %v", out, err)
			}
			_, err = s.exec(over, "server", "main", "", "sh", "-c", "exit 42")
			var code exec.CodeExitError
			if !errors.As(err, &code) || code.Code != 42 {
				t.Errorf("exit code 42 became %v", err)
			}
			if _, err = s.exec(over, "server", "main", "", "/no/such/program"); err == nil || !strings.Contains(err.Error(), "/no/such/program") {
				t.Errorf("a program that is missing became %v", err)
			}
			big, err := s.exec(over, "server", "main", "", "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x")
			if err != nil || len(big) != 3000000 {
				t.Errorf("got %d bytes of 3000000, %v", len(big), err)
			}
			s.terminal(over)
		})
	}
	_, err := s.ask(s.t.Context(), http.MethodPost, fmt.Sprintf("/run/%s/%s/main?cmd=%s", namespace, podName("server"), url.QueryEscape("ls /no/such/file")))
	if err == nil || !strings.Contains(err.Error(), "No such file or directory") {
		s.t.Errorf("run of what fails said %v", err)
	}
}

// terminal checks that a terminal of an exec has the client's size.
func (s *story) terminal(over transport) {
	executor, err := s.executor(over, "exec", "server", "main", url.Values{"command": {"sh", "-c", "sleep 0.5; stty size; tty"}, "output": {"1"}, "tty": {"1"}, "input": {"1"}})
	must(s.t, err)
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	var out buffer
	sizes := make(sizeQueue, 1)
	sizes <- remotecommand.TerminalSize{Width: 123, Height: 45}
	in, hold := io.Pipe()
	defer func() { _ = hold.Close() }()
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: &out, Tty: true, TerminalSizeQueue: sizes})
	if err != nil || !strings.Contains(out.String(), "45 123") || !strings.Contains(out.String(), "/dev/pts/") {
		s.t.Errorf("the terminal says %q, %v", out.String(), err)
	}
	close(sizes)
}

type sizeQueue chan remotecommand.TerminalSize

func (q sizeQueue) Next() *remotecommand.TerminalSize {
	size, ok := <-q
	if !ok {
		return nil
	}
	return &size
}

func attaches(s *story) {
	for _, over := range []transport{overWebSocket, overSPDY} {
		for container, ending := range map[string]string{"echo": "\n", "terminal": "\r\n"} {
			s.t.Run(string(over)+"-"+container, func(t *testing.T) {
				query := url.Values{"input": {"1"}, "output": {"1"}}
				if container == "terminal" {
					query.Set("tty", "1")
				}
				executor, err := s.executor(over, "attach", "server", container, query)
				must(t, err)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				in, write := io.Pipe()
				read, out := io.Pipe()
				ended := make(chan error, 1)
				go func() {
					err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: out, Tty: container == "terminal"})
					_ = out.CloseWithError(io.EOF)
					ended <- err
				}()
				word := string(over) + "-hello"
				_, err = io.WriteString(write, word+"\n")
				must(t, err)
				lines := bufio.NewReader(read)
				for {
					line, err := lines.ReadString('\n')
					if err != nil {
						t.Errorf("before the answer: %v", err)
						break
					}
					if line == "said "+word+ending {
						break
					}
				}
				cancel()
				go func() { _, _ = io.Copy(io.Discard, lines) }()
				<-ended
			})
		}
	}
}

func forwards(s *story) {
	for _, over := range []transport{overSPDY, overWebSocket} {
		s.t.Run(string(over), func(t *testing.T) {
			address, err := url.Parse(fmt.Sprintf("%s/portForward/%s/%s", server, namespace, podName("server")))
			must(t, err)
			dialer, err := portForwarder(over, address)
			must(t, err)
			stop, up := make(chan struct{}), make(chan struct{})
			var out, problems buffer
			forwarder, err := portforward.NewOnAddressesForStreaming(dialer, []string{"127.0.0.1"}, []string{"0:80"}, stop, up, &out, &problems)
			must(t, err)
			ended := make(chan error, 1)
			go func() { ended <- forwarder.ForwardPorts() }()
			select {
			case <-up:
			case err := <-ended:
				t.Fatalf("forwarding ended: %v", err)
			}
			ports, err := forwarder.GetPorts()
			must(t, err)
			story := s.story(t)
			for range 3 {
				story.wantPage(fmt.Sprintf("http://127.0.0.1:%d/", ports[0].Local), "Welcome to nginx!")
			}
			client.CloseIdleConnections()
			close(stop)
			if err := <-ended; err != nil {
				t.Errorf("forwarding ended with %v", err)
			}
			if problems.String() != "" {
				t.Errorf("problems: %s", problems.String())
			}
		})
	}
}

func portForwarder(over transport, address *url.URL) (httpstream.Dialer, error) {
	config := restConfig()
	if over == overWebSocket {
		return portforward.NewSPDYOverWebsocketDialerForStreaming(address, config)
	}
	round, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: round}, http.MethodPost, address), nil
}

// checkpoints are made by CRIU, which the machine may lack: kubelet gets a clear answer then.
func checkpoints(s *story) {
	_, err := s.ask(s.t.Context(), http.MethodPost, fmt.Sprintf("/checkpoint/%s/%s/main", namespace, podName("server")))
	if err != nil && !strings.Contains(err.Error(), "criu") {
		s.t.Errorf("a checkpoint said %v", err)
	}
}
