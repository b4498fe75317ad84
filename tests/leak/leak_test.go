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
	scope := Scope{Dirs: []string{dir}, Ignore: []*regexp.Regexp{regexp.MustCompile(`^(process|socket|mount|cgroup|link|iptables): `)}}
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
	scope := Scope{Dirs: []string{dir}, Ignore: []*regexp.Regexp{regexp.MustCompile(`^(process|socket|mount|cgroup|link|iptables): `)}}
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

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}
