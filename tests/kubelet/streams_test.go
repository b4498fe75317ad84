//go:build kubelet

package kubelet

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/tools/remotecommand"
)

// transport is how a client of kubelet streams.
type transport string

const (
	overWebSocket transport = "WebSocket"
	overSPDY      transport = "SPDY"
)

// executor streams with a container by kubelet: exec or attach.
func (s *story) executor(over transport, call, name, container string, query url.Values) (remotecommand.Executor, error) {
	address, err := url.Parse(fmt.Sprintf("%s/%s/%s/%s/%s?%s", server, call, namespace, podName(name), container, query.Encode()))
	if err != nil {
		return nil, err
	}
	if over == overSPDY {
		return remotecommand.NewSPDYExecutor(restConfig(), http.MethodPost, address)
	}
	return remotecommand.NewWebSocketExecutor(restConfig(), http.MethodGet, address.String())
}

// exec runs a command in a container, gives it an input and gives what it wrote to both outputs.
func (s *story) exec(over transport, name, container, input string, command ...string) (string, error) {
	query := url.Values{"command": command, "output": {"1"}, "error": {"1"}}
	if input != "" {
		query.Set("input", "1")
	}
	executor, err := s.executor(over, "exec", name, container, query)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	var out buffer
	options := remotecommand.StreamOptions{Stdout: &out, Stderr: &out}
	if input != "" {
		options.Stdin = strings.NewReader(input)
	}
	err = executor.StreamWithContext(ctx, options)
	return out.String(), err
}

// buffer is written by several streams.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
