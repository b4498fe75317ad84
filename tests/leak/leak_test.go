package leak

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSinceNamesOnlyWhatIsNew(t *testing.T) {
	dir := t.TempDir()
	scope := Scope{Dirs: []string{dir}, Ignore: []*regexp.Regexp{regexp.MustCompile(`^(process|socket|mount|cgroup|link|iptables|passed): `)}}
	write(t, filepath.Join(dir, "old"))
	before, err := Take(t.Context(), scope)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "new"))
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	after, err := Take(t.Context(), scope)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"file: ---------- " + filepath.Join(dir, "new"), "file: p--------- " + filepath.Join(dir, "fifo")}
	if got := after.Since(before); !slices.Equal(got, want) {
		t.Errorf("Since = %q, want %q", got, want)
	}
}

func TestSettleWaitsForWhatGoesAwayByItself(t *testing.T) {
	dir := t.TempDir()
	scope := Scope{Dirs: []string{dir}, Ignore: []*regexp.Regexp{regexp.MustCompile(`^(process|socket|mount|cgroup|link|iptables|passed): `)}}
	before, err := Take(t.Context(), scope)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "slow")
	write(t, path)
	timer := time.AfterFunc(200*time.Millisecond, func() { _ = os.Remove(path) })
	defer timer.Stop()
	leaked, err := Settle(t.Context(), before, scope, 10*time.Second)
	if err != nil || len(leaked) != 0 {
		t.Errorf("Settle = %q, %v", leaked, err)
	}
}

func TestWhatIsPassedToRuntimesCounts(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	before, err := Take(t.Context(), Scope{})
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "runc-process1"))
	if err := os.Mkdir(filepath.Join(dir, "pty2"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "pty2", "pty.sock"))
	after, err := Take(t.Context(), Scope{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"runc-process1", "pty2/pty.sock"} {
		if got := after.Since(before); !slices.Contains(got, "passed: "+filepath.Join(dir, want)) {
			t.Errorf("Since = %q, without %s", got, want)
		}
	}
}

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}
