package preflight

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func TestPrograms(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	foreign := []byte(strings.Repeat("\x00", headSize))
	copy(foreign, "\x7fELF\x02\x01\x01")
	foreign[elfMachine] = 99
	own = own[:elfHeaderLength]
	own[elfCount], own[elfCount+1] = 0, 0 // whether this test has a loader does not matter
	write("bin/native", string(own), 0o755)
	write("bin/foreign", string(foreign), 0o755)
	write("bin/text", "echo hello\n", 0o755)
	write("bin/empty", "", 0o755)
	write("bin/plain", "echo hello\n", 0o644)
	write("bin/script", "#! /bin/native -x\n", 0o755)
	write("bin/lost", "#!/bin/absent\n", 0o755)
	write("bin/weird", "#!relative\n", 0o755)
	write("bin/endless", "#!/"+strings.Repeat("x", 2*headSize), 0o755)
	for link, target := range map[string]string{"bin/link": "/bin/script", "bin/out": "../../../../../bin/lost", "bin/loop": "loop"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	root, err := openRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	for _, test := range []struct {
		program string
		want    string // in the error; empty for none
		none    bool   // no file is found
	}{
		{program: "native"},
		{program: "/bin/script"},
		{program: "link"},
		{program: "weird"},
		{program: "endless"},
		{program: "lost", want: `"/bin/absent"`},
		{program: "./out", want: `"/bin/absent"`},
		{program: "foreign", want: "another machine"},
		{program: "text", want: "exec format error"},
		{program: "empty", want: "exec format error"},
		{program: "plain", none: true},
		{program: "/bin", none: true},
		{program: "loop", none: true},
		{program: "missing", none: true},
	} {
		t.Run(test.program, func(t *testing.T) {
			_, file := find(root, &specs.Process{Args: []string{test.program}, Cwd: "/bin", Env: []string{"PATH=/none:/bin"}})
			if (file == nil) != test.none {
				t.Fatalf("file found: %t", file != nil)
			}
			if file == nil {
				return
			}
			defer func() { _ = file.Close() }()
			err := runnable(root, file, false)
			switch {
			case test.want == "" && err != nil:
				t.Errorf("unexpected: %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("error %v, want one with %s", err, test.want)
			}
		})
	}
}

// A process that is not in the container's control group says nothing about its program.
func TestForeignProcessIsNotJudged(t *testing.T) {
	err := Programs{}.Check("no-such-container", uint32(os.Getpid()), &specs.Process{Args: []string{"/etc/hosts"}})
	if err != nil {
		t.Error(err)
	}
}

// What the kernel takes is found out by asking it.
func TestArgumentsFitAsTheKernelSays(t *testing.T) {
	t.Parallel()
	run := func(args []string, env string) error {
		cmd := exec.CommandContext(t.Context(), "/bin/true", args...)
		cmd.Env = []string{"A=" + env}
		return cmd.Run()
	}
	space := argumentSpace(uint32(os.Getpid()))
	longest := 32*os.Getpagesize() - 1
	many := func(n uint64) []string {
		return slices.Repeat([]string{strings.Repeat("x", 1000)}, int(n/1009))
	}
	for name, tt := range map[string]struct {
		args []string
		env  string
		fits bool
	}{
		"few":                   {[]string{"a"}, "b", true},
		"longest":               {[]string{strings.Repeat("x", longest)}, "", true},
		"one too long":          {[]string{strings.Repeat("x", longest+1)}, "", false},
		"variable too long":     {nil, strings.Repeat("x", longest-1), false},
		"as much as there is":   {many(space - 20_000), "", true},
		"more than there is":    {many(space + 20_000), "", false},
		"together more than it": {many(space - 50_000), strings.Repeat("x", 60_000), false},
	} {
		kernel := run(tt.args, tt.env)
		if (kernel == nil) != tt.fits {
			t.Errorf("%s: the kernel says %v", name, kernel)
		}
		err := fits(&specs.Process{Args: append([]string{"/bin/true"}, tt.args...), Env: []string{"A=" + tt.env}}, space)
		if (err == nil) != tt.fits || err != nil && (!errdefs.IsFailedPrecondition(err) || !errors.Is(err, unix.E2BIG)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A command with more than the kernel takes of anybody is refused; what lives in another kernel is
// not judged.
func TestCheckExec(t *testing.T) {
	t.Parallel()
	long := &specs.Process{Args: []string{"echo", strings.Repeat("x", 200_000)}}
	pid := uint32(os.Getpid())
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	own := strings.TrimSpace(string(groups)) // is found in itself, as an id is in the group of its container
	if err := (Programs{}).CheckExec(own, pid, long); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a long argument: %v", err)
	}
	if err := (Programs{}).CheckExec(own, pid, &specs.Process{Args: []string{"echo", "x"}}); err != nil {
		t.Errorf("a short one: %v", err)
	}
	if err := (Programs{}).CheckExec("elsewhere", pid, long); err != nil {
		t.Errorf("of another kernel: %v", err)
	}
}
