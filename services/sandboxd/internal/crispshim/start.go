package crispshim

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/cgroup"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/early"
)

const (
	// defaultSocketDir is where sockets lie if the runtime names no folder.
	defaultSocketDir = "/run/containerd/s"
	// maxSocketPath is the longest path that a socket can have.
	maxSocketPath = 106
	// maxParams bounds what is read from the standard input.
	maxParams = 10 << 20
	// answerTime is how long a shim that is there already may take to accept a connection.
	answerTime = 100 * time.Millisecond
	// firstOther is the first descriptor that is none of the standard ones.
	firstOther = 3
	// optionsFile keeps the runtime options of the pod in its bundle.
	optionsFile = "options.pb"
	configFile  = "config.json"
)

// groupAnnotations name the group of a container, the first that is there.
var groupAnnotations = [...]string{"io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"}

// start leaves a shim behind, unless there is one for the group already, and prints where it
// listens.
func start(ctx context.Context, i invocation, stdin io.Reader, stdout io.Writer) error {
	params, err := readParams(stdin, i)
	if err != nil {
		return err
	}
	group, err := groupOf(i.id)
	if err != nil {
		return err
	}
	path, err := socketPath(params, group, i)
	if err != nil {
		return err
	}
	l, err := listen(ctx, path)
	if errors.Is(err, errServed) {
		return answer(stdout, path)
	}
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	if waiter := early.Waiter(); waiter != nil {
		return become(ctx, l, path, params, i, waiter)
	}
	pid, err := launch(l, path, params, i)
	if err != nil {
		return errors.Join(err, os.Remove(path))
	}
	if err := settle(pid, params); err != nil {
		return errors.Join(err, unix.Kill(pid, unix.SIGKILL), os.Remove(path))
	}
	return answer(stdout, path)
}

// become makes the process itself the shim: waiter is the process that the runtime waits for.
func become(ctx context.Context, l *net.UnixListener, path string, params bootParams, i invocation, waiter *os.File) error {
	i.socket, i.debug = path, i.debug || params.debug
	err := settle(os.Getpid(), params)
	if err == nil {
		err = serve(ctx, i, l, func() error { return handOver(path, waiter) })
	}
	if err != nil {
		return errors.Join(err, removeSocket(path))
	}
	return nil
}

// handOver answers, lets go of what belongs to the command and ends it.
func handOver(path string, waiter *os.File) error {
	if err := answer(os.Stdout, path); err != nil {
		return err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for _, fd := range []int{unix.Stdin, unix.Stdout} {
		if err := unix.Dup2(int(null.Fd()), fd); err != nil {
			return os.NewSyscallError("dup2", err)
		}
	}
	// Fails if the command was killed meanwhile: nobody knows of this shim then.
	if _, err := waiter.Write([]byte{0}); err != nil {
		return fmt.Errorf("start command is gone: %w", err)
	}
	return waiter.Close()
}

func readParams(stdin io.Reader, i invocation) (bootParams, error) {
	data, err := io.ReadAll(io.LimitReader(stdin, maxParams))
	if err != nil {
		return bootParams{}, fmt.Errorf("bootstrap parameters: %w", err)
	}
	params, err := parseParams(data)
	if err != nil {
		return params, err
	}
	if params.id != i.id || params.namespace != i.namespace {
		return params, fmt.Errorf("bootstrap parameters are for %q in namespace %q, flags for %q in %q: %w",
			params.id, params.namespace, i.id, i.namespace, errdefs.ErrInvalidArgument)
	}
	return params, nil
}

// groupOf is the group of the container in the working folder: its pod, or itself.
func groupOf(id string) (string, error) {
	data, err := os.ReadFile(configFile)
	if err != nil {
		return "", err
	}
	var c struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return "", fmt.Errorf("%s: %w: %w", configFile, err, errdefs.ErrInvalidArgument)
	}
	for _, key := range groupAnnotations {
		if group, ok := c.Annotations[key]; ok {
			return group, nil
		}
	}
	return id, nil
}

// socketPath derives the socket of a group.
func socketPath(params bootParams, group string, i invocation) (string, error) {
	dir := params.socketDir
	if dir == "" {
		dir = defaultSocketDir
	}
	address := params.address
	if address == "" {
		address = i.address
	}
	sum := sha256.Sum256([]byte(filepath.Join(address, i.namespace, group, Name)))
	path := filepath.Join(dir, hex.EncodeToString(sum[:]))
	if len(path) > maxSocketPath {
		return "", fmt.Errorf("socket path %q is too long: %w", path, errdefs.ErrInvalidArgument)
	}
	return path, os.MkdirAll(dir, 0o700)
}

// errServed says that a shim listens already.
var errServed = errors.New("socket is served")

// listen makes the socket. What a dead shim left at the path is replaced.
func listen(ctx context.Context, path string) (*net.UnixListener, error) {
	for again := false; ; again = true {
		l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
		if err == nil {
			u, ok := l.(*net.UnixListener)
			if !ok {
				return nil, errors.Join(fmt.Errorf("socket %s: %w", path, errdefs.ErrInternal), l.Close())
			}
			return u, os.Chmod(path, 0o600)
		}
		if !errors.Is(err, unix.EADDRINUSE) || again {
			return nil, fmt.Errorf("socket: %w", err)
		}
		d := net.Dialer{Timeout: answerTime}
		if conn, err := d.DialContext(ctx, "unix", path); err == nil {
			return nil, errors.Join(errServed, conn.Close())
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
}

// launch starts the shim with the socket and returns its process id.
func launch(l *net.UnixListener, path string, params bootParams, i invocation) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	socket, err := l.File()
	if err != nil {
		return 0, err
	}
	defer socket.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	// What this process inherited is not the shim's.
	if err := unix.CloseRange(firstOther, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return 0, os.NewSyscallError("close_range", err)
	}
	args := []string{self, "-namespace", i.namespace, "-id", i.id, "-address", i.address, "-socket", path}
	if i.debug || params.debug {
		args = append(args, "-debug")
	}
	pid, err := syscall.ForkExec(self, args, &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{null.Fd(), null.Fd(), null.Fd(), socket.Fd()},
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return 0, fmt.Errorf("start of %s: %w", self, err)
	}
	return pid, nil
}

// settle puts the shim where it belongs, and keeps the options of the pod.
func settle(pid int, params bootParams) error {
	if params.options == nil {
		return adjustOOM(pid)
	}
	if err := os.WriteFile(optionsFile, params.options, 0o600); err != nil {
		return err
	}
	path, err := params.shimCgroup()
	if err != nil {
		return err
	}
	if path != "" {
		if err := cgroup.Join(path, pid); err != nil {
			return err
		}
	}
	return adjustOOM(pid)
}

// adjustOOM lets the kernel end the shim rather than the runtime that started it. Where that
// is not permitted the shim keeps what it inherited.
func adjustOOM(pid int) error {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(os.Getppid()) + "/oom_score_adj")
	if err != nil {
		return nil //nolint:nilerr // the runtime is gone, or hidden
	}
	score, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return nil //nolint:nilerr // not what is known of the file
	}
	err = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(strconv.Itoa(min(score+1, 1000))), 0)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func answer(stdout io.Writer, path string) error {
	_, err := stdout.Write(bootResult(path))
	return err
}
