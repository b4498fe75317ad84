package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

const (
	// maxMessage is how much of a shim's standard error goes into an error.
	maxMessage = 4 << 10
	// pipeDelay is how long the output of an ended shim command may be kept open by others.
	pipeDelay = 500 * time.Millisecond
)

// errTooMuch says that a shim printed more than it may.
var errTooMuch = errors.New("answer is too long")

// call is one run of a shim's binary.
type call struct {
	shim   string
	action string
	id     string
	dir    string
	stdin  []byte
	limit  time.Duration
}

// run runs a shim's binary and returns what it printed. Whatever is left of its process
// group is killed when the time is up.
func (m *Manager) run(ctx context.Context, c call) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.limit,
		fmt.Errorf("no answer within %s: %w", c.limit, errdefs.ErrUnavailable))
	defer cancel()

	args := []string{"-namespace", pod.Namespace, "-address", m.cfg.Address, "-publish-binary", m.binary, "-id", c.id}
	if c.action == "delete" {
		args = append(args, "-bundle", c.dir)
	}
	if m.cfg.Debug {
		args = append(args, "-debug")
	}
	cmd := exec.CommandContext(ctx, c.shim, append(args, c.action)...)
	cmd.Dir = c.dir
	cmd.Env = m.env
	cmd.Stdin = bytes.NewReader(c.stdin)
	stdout := &capped{limit: maxAnswer, fail: true}
	stderr := &capped{limit: maxMessage}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// A session of its own: nothing that ends this process reaches the shim.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = pipeDelay

	err := cmd.Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		// The command ended well; only a pipe was inherited by the shim proper.
		err = nil
	}
	if err != nil {
		return nil, callError(ctx, c, stdout, stderr, err)
	}
	return stdout.buf.Bytes(), nil
}

func callError(ctx context.Context, c call, stdout, stderr *capped, err error) error {
	var sentinel error = errdefs.ErrInternal
	switch {
	case stdout.exceeded:
		err = fmt.Errorf("%w (limit %d bytes)", errTooMuch, maxAnswer)
	case ctx.Err() != nil:
		err = context.Cause(ctx)
		sentinel = nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.ENOEXEC):
		sentinel = errdefs.ErrFailedPrecondition
	}
	said := strings.TrimSpace(stderr.buf.String())
	if said == "" && !stdout.exceeded {
		said = strings.TrimSpace(strings.ToValidUTF8(stdout.buf.String(), "?"))
	}
	if said != "" {
		err = fmt.Errorf("%w: %.4096s", err, said)
	}
	if sentinel != nil {
		err = fmt.Errorf("%w: %w", err, sentinel)
	}
	return fmt.Errorf("shim %q: %s: %w", filepath.Base(c.shim), c.action, err)
}

// start runs the shim's start command and returns its answer.
func (m *Manager) start(ctx context.Context, shim, id, dir string, options *anypb.Any) ([]byte, error) {
	stdin, err := m.params(id, options)
	if err != nil {
		return nil, fmt.Errorf("shim parameters: %w", err)
	}
	return m.run(ctx, call{
		shim: shim, action: "start", id: id, dir: dir, stdin: stdin, limit: m.cfg.Timeouts.Start,
	})
}

// delete runs the shim's delete command, which ends and removes what a dead shim left of a
// container, and returns the exit that it found out.
func (m *Manager) delete(ctx context.Context, shim, id, dir string) (pod.Exit, error) {
	answer, err := m.run(ctx, call{
		shim: shim, action: "delete", id: id, dir: dir, limit: m.cfg.Timeouts.Cleanup,
	})
	if err != nil {
		return pod.Exit{}, err
	}
	var resp taskapi.DeleteResponse
	if err := proto.Unmarshal(answer, &resp); err != nil {
		return pod.Exit{}, fmt.Errorf("shim %q: delete: %w: %w", filepath.Base(shim), err, errdefs.ErrInternal)
	}
	if resp.GetExitedAt() == nil {
		return pod.Exit{}, fmt.Errorf("shim %q: delete: no exit reported: %w", filepath.Base(shim), errdefs.ErrNotFound)
	}
	return pod.Exit{Pid: resp.GetPid(), Code: resp.GetExitStatus(), At: resp.GetExitedAt().AsTime()}, nil
}

// capped keeps the first bytes that are written to it. Beyond its limit it fails, which
// ends the writer, or drops the rest.
type capped struct {
	buf      bytes.Buffer
	limit    int
	fail     bool
	exceeded bool
}

// Write implements io.Writer.
func (c *capped) Write(p []byte) (int, error) {
	room := c.limit - c.buf.Len()
	if len(p) <= room {
		return c.buf.Write(p)
	}
	c.buf.Write(p[:room])
	c.exceeded = true
	if c.fail {
		return room, errTooMuch
	}
	return len(p), nil
}
