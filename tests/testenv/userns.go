package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/tests/fixture"
)

// Kinds of user namespaces: of a user who may make no control groups, and of one to whom some are
// delegated.
const (
	NestedPlain     = "plain"
	NestedDelegated = "delegated"
)

// nestedVariable asks for a user namespace around all tests of a program, by its kind. Inside, it
// says which kind it is.
const nestedVariable = "CRISP_TEST_USERNS"

// delegatedVariable is the control group that is delegated, inside.
const delegatedVariable = "CRISP_TEST_DELEGATED"

// The ordinary user who makes the user namespace, and the first of the subordinate ids. Nobody
// needs to know them: they stand in no file.
const (
	nestedUser   = 61_937
	nestedIDs    = 700_000
	nestedLength = 65_536
)

// InUserNamespace tells a story as root of a user namespace that an ordinary user has made with
// subordinate ids: it runs the test once more there, by its name. The package's TestMain must call
// Main. It skips the test where no ordinary user may make such a namespace.
func InUserNamespace(t *testing.T, kind string, story func(t *testing.T)) {
	t.Helper()
	if inside := os.Getenv(nestedVariable); inside != "" {
		if inside != kind {
			t.Skipf("all tests run in a user namespace of another kind, %s", inside)
		}
		story(t)
		return
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to give an ordinary user subordinate ids")
	}
	args := []string{"-test.run=^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$", "-test.v", "-test.timeout=0"}
	status, err := nest(t.Context(), kind, args, t.Output())
	if errors.Is(err, errNoUserNamespace) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if status != 0 {
		t.Errorf("inside: status %d", status)
	}
}

var errNoUserNamespace = errors.New("this machine lets no ordinary user make a user namespace")

// nest runs this program again as root of a user namespace of an ordinary user.
func nest(ctx context.Context, kind string, args []string, out io.Writer) (status int, err error) {
	bin, err := binFolder()
	if err != nil {
		return 0, err
	}
	shared, env, err := share(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(shared)) }()
	env = append(env, insideVariable+"=1", nestedVariable+"="+kind, "CRISP_BIN="+bin, "TMPDIR=/tmp", "HOME=/")
	// The program's own path may be closed to others; an open file is not.
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return 0, err
	}
	defer func() { _ = self.Close() }()
	// Who is not yet mapped loses its rights with the next program, and gets them with the one after
	// that. In between, the ids are written here, as by newuidmap.
	script := `read -r go && exec "$0" --mount --net --ipc --uts -- "$@"`
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"--user", "--", "sh", "-c", script, "unshare", "/proc/self/fd/3"}, args...)...)
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = append(os.Environ(), env...), out, out, []*os.File{self}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nestedUser, Gid: nestedUser}, Setpgid: true}
	begin, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	if kind == NestedDelegated {
		group := "/crisp-userns-" + strconv.Itoa(os.Getpid())
		cmd.Env = append(cmd.Env, delegatedVariable+"="+group)
		if err := makeDelegated(group); err != nil {
			return 0, errors.Join(err, removeDelegated(group))
		}
		defer func() { err = errors.Join(err, removeDelegated(group)) }()
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	err = mapIDs(ctx, cmd.Process.Pid)
	if err == nil && kind == NestedDelegated {
		err = joinDelegated("/crisp-userns-"+strconv.Itoa(os.Getpid()), cmd.Process.Pid)
	}
	if err == nil {
		_, err = io.WriteString(begin, "go\n")
	}
	if err != nil {
		_ = cmd.Process.Kill() // it is waited for all the same
	}
	waitErr := cmd.Wait()
	var exit *exec.ExitError
	if err == nil && waitErr != nil && !errors.As(waitErr, &exit) {
		err = waitErr
	}
	return cmd.ProcessState.ExitCode(), err
}

// share makes what images are made of readable for everybody, and tells the variables by which it
// is found.
func share(ctx context.Context) (folder string, env []string, err error) {
	parts, err := fixture.FindParts(ctx, fixture.PartsConfig{})
	if err != nil {
		return "", nil, fmt.Errorf("parts of images: %w", err)
	}
	folder, err = os.MkdirTemp("", "crisp-parts-")
	if err != nil {
		return "", nil, err
	}
	if err := os.Chmod(folder, 0o755); err != nil {
		return folder, nil, err
	}
	for variable, path := range map[string]string{fixture.BusyboxVariable: parts.Busybox, fixture.GuestVariable: parts.Guest} {
		data, err := os.ReadFile(path)
		if err != nil {
			return folder, nil, err
		}
		copied := filepath.Join(folder, filepath.Base(path))
		if err := os.WriteFile(copied, data, 0o755); err != nil {
			return folder, nil, err
		}
		env = append(env, variable+"="+copied)
	}
	return folder, append(env, "XDG_CACHE_HOME="+folder), os.Mkdir(filepath.Join(folder, "crisp-fixture"), 0o755)
}

// mapIDs waits until a process is in a user namespace of its own, and gives it the ids.
func mapIDs(ctx context.Context, pid int) error {
	own, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		return err
	}
	proc := "/proc/" + strconv.Itoa(pid)
	for {
		link, err := os.Readlink(proc + "/ns/user")
		if err != nil {
			return errNoUserNamespace
		}
		program, _ := os.ReadFile(proc + "/comm")
		if link != own && strings.TrimSpace(string(program)) == "sh" {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	text := fmt.Sprintf("0 %d 1\n1 %d %d\n", nestedUser, nestedIDs, nestedLength-1)
	return errors.Join(os.WriteFile(proc+"/uid_map", []byte(text), 0), os.WriteFile(proc+"/gid_map", []byte(text), 0))
}

// hierarchies are the folders of all hierarchies of control groups.
func hierarchies() ([]string, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range mounts {
		if !slices.Contains(out, m.Mountpoint) {
			out = append(out, m.Mountpoint)
		}
	}
	return out, nil
}

// makeDelegated makes a control group in all hierarchies and gives it to the user.
func makeDelegated(group string) error {
	folders, err := hierarchies()
	if err != nil {
		return err
	}
	for _, folder := range folders {
		own := filepath.Join(folder, group)
		if err := os.Mkdir(own, 0o755); err != nil {
			return err
		}
		// A new group of version 1 has no processors.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if have, err := os.ReadFile(filepath.Join(folder, file)); err == nil {
				if err := os.WriteFile(filepath.Join(own, file), have, 0); err != nil {
					return err
				}
			}
		}
		for _, file := range []string{"", "cgroup.procs", "tasks", "cgroup.subtree_control", "cgroup.threads"} {
			if err := os.Chown(filepath.Join(own, file), nestedUser, nestedUser); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

func joinDelegated(group string, pid int) error {
	folders, err := hierarchies()
	for _, folder := range folders {
		err = errors.Join(err, os.WriteFile(filepath.Join(folder, group, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0))
	}
	return err
}

func removeDelegated(group string) error {
	folders, err := hierarchies()
	for _, folder := range folders {
		var below []string
		walkErr := filepath.WalkDir(filepath.Join(folder, group), func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				below = append(below, path)
			}
			return nil
		})
		err = errors.Join(err, walkErr)
		for _, path := range slices.Backward(below) {
			err = errors.Join(err, removeCgroup(path))
		}
	}
	return err
}

// furnishNested does in a user namespace what a rootless environment does: folders for short-lived
// files are the namespace's own.
func furnishNested() error {
	// The parent waits for this process, and it is to end with it.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	return os.Mkdir("/run/lock", 0o755)
}
