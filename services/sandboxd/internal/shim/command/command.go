// Package command runs the commands of a shim's binary, as containerd's shim protocol (version
// 2) has them: start, delete and -info. It knows which binary a runtime handler has, what the
// binary is told, and what its answers mean.
//
// Each run has a limit of its own, and nothing of it is left when that is over, except for the
// shim proper that a start leaves behind. The package keeps no state; all of it may be called
// concurrently.
package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/link"
)

const (
	// maxMessage is how much of a shim's standard error goes into an error.
	maxMessage = 4 << 10
	// pipeDelay is how long the output of an ended shim command may be kept open by others. Within it
	// this process must get to read what the command wrote, and on a busy node that takes a while.
	pipeDelay = 5 * time.Second
)

// errTooMuch says that a shim printed more than it may.
var errTooMuch = errors.New("answer is too long")

// Config is what all shims are told.
type Config struct {
	// SocketDir is where shims that understand it put their sockets. Empty leaves it to the
	// shim.
	SocketDir string
	// EventsSocket is the path of the ttrpc event service.
	EventsSocket string
	// Address is passed as the address of the gRPC service.
	Address string
	// Version is the version of the runtime.
	Version string
	// Env is added to the environment of shims, which is PATH, the variables of OpenTelemetry,
	// those of the protocol and the folder Passing, and nothing else.
	Env []string
	// Debug makes shims log more.
	Debug bool
}

// Runner runs commands. It is safe for concurrent use.
type Runner struct {
	cfg    Config
	binary string // of this process, for shims that publish events by running it
	env    []string
}

// New returns a runner.
func New(cfg Config) (*Runner, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return &Runner{cfg: cfg, binary: self, env: environment(cfg)}, nil
}

// environment is what a shim's start command sees.
func environment(cfg Config) []string {
	var env []string
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "PATH=") || strings.HasPrefix(kv, "OTEL_") {
			env = append(env, kv)
		}
	}
	env = append(env,
		"GOMAXPROCS=2",
		"MAX_SHIM_VERSION=2",
		"TTRPC_ADDRESS="+cfg.EventsSocket,
		"GRPC_ADDRESS="+cfg.Address,
		"NAMESPACE="+pod.Namespace,
	)
	return append(env, cfg.Env...)
}

// Shim says whose command it is.
type Shim struct {
	// Path is the shim's binary.
	Path string
	// ID is the id of the sandbox, or of the container that is deleted.
	ID string
	// Dir is the bundle, in which the command works.
	Dir string
	// Passing is a folder for what the shim passes to its OCI runtime; empty: the folder of
	// temporary files. The clients of OCI runtimes take it from XDG_RUNTIME_DIR.
	Passing string
}

// call is one run of a shim's binary.
type call struct {
	Shim

	action string
	stdin  []byte
	limit  time.Duration
}

// run runs a shim's binary and returns what it printed. Whatever is left of its process
// group is killed when the time is up.
func (r *Runner) run(ctx context.Context, c call) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.limit,
		fmt.Errorf("no answer within %s: %w", c.limit, errdefs.ErrUnavailable))
	defer cancel()

	args := []string{"-namespace", pod.Namespace, "-address", r.cfg.Address, "-publish-binary", r.binary, "-id", c.ID}
	if c.action == "delete" {
		args = append(args, "-bundle", c.Dir)
	}
	if r.cfg.Debug {
		args = append(args, "-debug")
	}
	cmd := exec.CommandContext(ctx, c.Path, append(args, c.action)...)
	cmd.Dir = c.Dir
	cmd.Env = r.env
	if c.Passing != "" {
		cmd.Env = append(slices.Clone(r.env), "XDG_RUNTIME_DIR="+c.Passing)
	}
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
	return fmt.Errorf("shim %q: %s: %w", filepath.Base(c.Path), c.action, err)
}

// Start runs the start command, within limit, and returns where the shim that it left behind
// listens. options are those of the runtime, nil for none. Errors: ErrFailedPrecondition for a
// binary that cannot be run, ErrUnavailable when it takes too long, ErrNotImplemented for an
// answer of another version, else ErrInternal.
func (r *Runner) Start(ctx context.Context, shim Shim, options *anypb.Any, limit time.Duration) (link.Endpoint, error) {
	stdin, err := r.params(shim.ID, options)
	if err != nil {
		return link.Endpoint{}, fmt.Errorf("shim parameters: %w", err)
	}
	answer, err := r.run(ctx, call{Shim: shim, action: "start", stdin: stdin, limit: limit})
	if err != nil {
		return link.Endpoint{}, err
	}
	e, err := parseAnswer(answer)
	if err != nil {
		return link.Endpoint{}, fmt.Errorf("shim %q: start: %w", shim.Path, err)
	}
	return e, nil
}

// Delete runs the delete command, within limit, which ends and removes what a dead shim left of
// a container, and returns the exit that it found out. Errors: as Start, and ErrNotFound if it
// found out none.
func (r *Runner) Delete(ctx context.Context, shim Shim, limit time.Duration) (pod.Exit, error) {
	answer, err := r.run(ctx, call{Shim: shim, action: "delete", limit: limit})
	if err != nil {
		return pod.Exit{}, err
	}
	var resp taskapi.DeleteResponse
	if err := proto.Unmarshal(answer, &resp); err != nil {
		return pod.Exit{}, fmt.Errorf("shim %q: delete: %w: %w", filepath.Base(shim.Path), err, errdefs.ErrInternal)
	}
	if resp.GetExitedAt() == nil {
		return pod.Exit{}, fmt.Errorf("shim %q: delete: no exit reported: %w", filepath.Base(shim.Path), errdefs.ErrNotFound)
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
