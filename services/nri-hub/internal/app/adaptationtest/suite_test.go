package adaptationtest_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

const (
	theirs = "github.com/containerd/nri/pkg/adaptation"
	ours   = "github.com/crisp-cri/crisp/services/nri-hub/internal/app/adaptationtest"

	// leastPassed is a little less than what the suite has of tests. It keeps a suite that
	// was not found, or not run, from passing.
	leastPassed = 150
)

// broken are the expectations of the suite that this hub does not meet on purpose, with
// the reasons. They are skipped by name.
func broken() map[string]string {
	const twoEntries = "" +
		"Expects a removal and a value for one key of one map. A map has no order, so that who carries both out loses the value every now and then; " +
		"this hub gives the value alone, which replaces what was there."
	const combined = "TestPluginContainerCreationAdjustments/there_are_multiple_plugins/should_be_successfully_combined_if_there_are_no_conflicts/"
	return map[string]string{
		combined + "adjust_annotations":       twoEntries,
		combined + "adjust_linux_net_devices": twoEntries,
		"TestPluginFailureScenarios/D:_the_required_plugins_check_does_not_catch_a_dropped_plugin": "" +
			"States as a fact that a container is created without a required plugin that timed out. This hub counts answers, not attempts, and refuses.",
	}
}

// The test suite of NRI's own pkg/adaptation passes against this hub. Its files are taken
// from the module cache, and import our adapter instead of the package they were written
// for.
func TestUpstreamSuite(t *testing.T) {
	suite := build(t)
	t.Run("passes", func(t *testing.T) {
		skipped := slices.Sorted(maps.Keys(broken()))
		passed := 0
		var failed []string
		for name, r := range run(t, suite, "-test.skip", exactly(skipped)) {
			switch r.action {
			case "pass":
				passed++
			case "fail":
				failed = append(failed, name)
				t.Logf("%s failed:\n%s", name, r.output)
			default:
				t.Errorf("%s ended with %q; only what is listed may be skipped", name, r.action)
			}
		}
		// The suite's plugins take a connection that is closed while an answer lies in it for
		// lost, or not, by chance: what failed is run once more by itself.
		for _, name := range failed {
			if again, ok := run(t, suite, "-test.run", exactly([]string{name}))[name]; !ok || again.action != "pass" {
				t.Errorf("%s failed twice:\n%s", name, again.output)
			}
		}
		if passed+len(failed) < leastPassed {
			t.Errorf("only %d tests of the suite ran, want at least %d", passed, leastPassed)
		}
		t.Logf("%d tests of the suite passed, %d are skipped by name", passed, len(skipped))
	})
	// What is listed is there and fails; else the list is out of date.
	t.Run("list", func(t *testing.T) {
		for name := range broken() {
			results := run(t, suite, "-test.run", exactly([]string{name}))
			switch r, ok := results[name]; {
			case !ok:
				t.Errorf("%s: the suite has no such test", name)
			case r.action != "fail":
				t.Errorf("%s ended with %q and need not be skipped", name, r.action)
			}
		}
	})
}

// exactly is a pattern of the testing package for tests of these names.
func exactly(names []string) string {
	alternatives := make([]string, 0, len(names))
	for _, n := range names {
		parts := strings.Split(n, "/")
		for i, p := range parts {
			parts[i] = "^" + regexp.QuoteMeta(p) + "$"
		}
		alternatives = append(alternatives, strings.Join(parts, "/"))
	}
	return strings.Join(alternatives, "|")
}

// build compiles the suite as a package that exists only for the compiler, beside this
// one, which lets it import our internal packages.
func build(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	source := strings.TrimSpace(output(t, exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}", theirs)))
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	overlay := map[string]string{}
	for _, name := range []string{"suite_test.go", "adaptation_suite_test.go", "failure_policy_test.go"} {
		text, err := os.ReadFile(filepath.Join(source, name))
		if err != nil {
			t.Fatal(err)
		}
		rewritten := bytes.ReplaceAll(text, []byte(`"`+theirs+`"`), []byte(`"`+ours+`"`))
		if bytes.Equal(rewritten, text) {
			t.Fatalf("%s does not import %s", name, theirs)
		}
		copied := filepath.Join(folder, name)
		if err := os.WriteFile(copied, rewritten, 0o600); err != nil {
			t.Fatal(err)
		}
		overlay[filepath.Join(here, "upstream", name)] = copied
	}
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(folder, "overlay.json")
	if err := os.WriteFile(list, text, 0o600); err != nil {
		t.Fatal(err)
	}
	suite := filepath.Join(folder, "suite.test")
	args := []string{"test", "-c", "-vet=off", "-overlay", list, "-o", suite}
	if underRaceDetector() {
		args = append(args, "-race")
	}
	output(t, exec.CommandContext(t.Context(), "go", append(args, ours+"/upstream")...))
	return suite
}

// underRaceDetector says whether this test is, so that the suite can be too.
func underRaceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool {
		return s.Key == "-race" && s.Value == "true"
	})
}

func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, complaints.Bytes())
	}
	return string(out)
}

type result struct{ action, output string }

// run runs tests of the suite and returns how each of them ended.
func run(t *testing.T, suite string, args ...string) map[string]*result {
	t.Helper()
	args = append([]string{"tool", "test2json", "-t", suite, "-test.v=test2json", "-test.timeout=5m"}, args...)
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = t.TempDir()
	out, err := cmd.CombinedOutput()
	results := map[string]*result{}
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Test == "" {
			continue
		}
		r, ok := results[e.Test]
		if !ok {
			r = &result{}
			results[e.Test] = r
		}
		switch e.Action {
		case "output":
			r.output += e.Output
		case "pass", "fail", "skip":
			r.action = e.Action
		}
	}
	if len(results) == 0 {
		t.Fatalf("the suite did not run: %v\n%s", err, out)
	}
	return results
}
