package testenv

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// Crictl runs crictl against the system and gives its standard output.
func (s *System) Crictl(ctx context.Context, args ...string) (string, error) {
	path, err := Binary("crictl")
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	endpoint := "unix://" + s.Socket()
	cmd := exec.CommandContext(ctx, path, append([]string{"--config", "/dev/null", "--runtime-endpoint", endpoint, "--image-endpoint", endpoint, "--timeout", "60s"}, args...)...)
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("crictl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(problem.String()))
	}
	return out.String(), nil
}

// EventBus runs a command of the eventbus program with the system's
// configuration, such as "tail", and gives it back started. Its output goes to
// the returned buffer's owner through cmd.Stdout as set by the caller.
func (s *System) EventBus(ctx context.Context, args ...string) (*exec.Cmd, error) {
	path, err := Binary(string(EventBus))
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = s.environment(EventBus)
	return cmd, nil
}
