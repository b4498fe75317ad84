package folder

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// groups makes folders with the files of a control group.
func groups(t *testing.T, files map[string]string, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, content := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func content(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// What a container has frozen below its own group is thawed, or it would never die.
func TestKillThawsWhatIsBelow(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	below := filepath.Join(dir, "a", "b")
	groups(t, map[string]string{"freezer.state": "FROZEN"}, dir, below)
	Kill(dir)
	for _, d := range []string{dir, below} {
		if state := content(t, filepath.Join(d, "freezer.state")); state != "THAWED" {
			t.Errorf("%s: %q", d, state)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "cgroup.kill")); !os.IsNotExist(err) {
		t.Errorf("a control file was made: %v", err)
	}
}

// A group of version 2 is killed as a whole and has nothing to thaw.
func TestKillOfVersion2(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	groups(t, map[string]string{"cgroup.kill": ""}, dir)
	Kill(dir)
	if got := content(t, filepath.Join(dir, "cgroup.kill")); got != "1" {
		t.Errorf("cgroup.kill is %q", got)
	}
	if _, err := os.Stat(filepath.Join(dir, "freezer.state")); !os.IsNotExist(err) {
		t.Errorf("a control file was made: %v", err)
	}
}

// Each process counts once, in whichever hierarchies it is; those without a number here do not.
func TestPids(t *testing.T) {
	t.Parallel()
	one, two := t.TempDir(), t.TempDir()
	groups(t, map[string]string{"cgroup.procs": "7\n0\n5\n"}, one)
	groups(t, map[string]string{"cgroup.procs": "9\n7\n"}, two, filepath.Join(two, "below"))
	pids, err := Pids(one, two, filepath.Join(one, "gone"))
	if err != nil || !slices.Equal(pids, []int{5, 7, 9}) {
		t.Errorf("%v, %v", pids, err)
	}
}
