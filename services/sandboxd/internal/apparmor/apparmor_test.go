package apparmor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/contrib/apparmor"
)

func TestListed(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "profiles")
	text := "crisp-default (enforce)\n/usr/bin/man (complain)\nodd (name) here (enforce)\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"crisp-default": true, "/usr/bin/man": true, "odd (name) here": true, "crisp": false, "odd": false, "": false,
	} {
		if got, err := listed(file, name); err != nil || got != want {
			t.Errorf("%q: %v, %v", name, got, err)
		}
	}
	if _, err := listed(file+"x", "a"); err == nil {
		t.Error("no error for a missing list")
	}
}

// TestDefaultProfile shows that the profile which is loaded restricts what it should.
func TestDefaultProfile(t *testing.T) {
	t.Parallel()
	text, err := apparmor.DumpDefaultProfile("crisp-default")
	if err != nil {
		t.Skipf("no profile can be made here: %v", err) // the template asks the installed parser
	}
	for _, want := range []string{"profile crisp-default ", "deny mount", "deny @{PROC}/kcore", "signal (receive) peer=unconfined"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in the profile", want)
		}
	}
}
