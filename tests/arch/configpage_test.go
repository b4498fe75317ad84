package arch

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/crisp-cri/crisp/tests/testenv"
)

var update = flag.Bool("update", false, "write the tables of docs/configuration.md anew")

// key is a key of a configuration file.
type key struct{ name, value, meaning string }

// keysOf reads the keys of an example file, which is what the program prints by itself. A key
// without a comment of its own has its section's.
func keysOf(t *testing.T, file string) []key {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out []key
	var section, ofSection string
	var comment []string
	pair := regexp.MustCompile(`^(\w+) = (.*)$`)
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		line := lines.Text()
		if c, ok := strings.CutPrefix(line, "#"); ok {
			comment = append(comment, strings.TrimSpace(c))
			continue
		}
		said := strings.Join(comment, " ")
		comment = nil
		if m := pair.FindStringSubmatch(line); m != nil {
			if said == "" {
				said = ofSection
			}
			out = append(out, key{section + m[1], strings.ReplaceAll(m[2], "'", `"`), said})
		} else if strings.HasPrefix(line, "[") {
			section, ofSection = strings.Trim(line, "[]")+".", said
		}
	}
	return out
}

// table is what the page says of the keys of a process.
func table(keys []key) string {
	var out strings.Builder
	out.WriteString("| key | default | meaning |\n|---|---|---|\n")
	handler := regexp.MustCompile(`^runtime\.handlers\.[^.]+\.`)
	said := map[string]bool{}
	for _, k := range keys {
		// Handlers have the same keys; the first one speaks for all.
		name := handler.ReplaceAllString(k.name, "runtime.handlers.NAME.")
		if said[name] {
			continue
		}
		said[name] = true
		fmt.Fprintf(&out, "| `%s` | `%s` | %s |\n", name, k.value, strings.ReplaceAll(k.meaning, "|", `\|`))
	}
	return out.String()
}

// TestConfigurationPageNamesEveryKey compares the manual with the examples, which the services'
// own tests compare with the programs.
func TestConfigurationPageNamesEveryKey(t *testing.T) {
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "docs", "configuration.md")
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	page := string(raw)
	var all []string
	for _, p := range []testenv.Process{testenv.Gateway, testenv.Sandboxd, testenv.NRIHub, testenv.EventBus} {
		keys := keysOf(t, filepath.Join(root, "services", string(p), "config.example.toml"))
		for _, k := range keys {
			all = append(all, k.name)
		}
		begin, end := fmt.Sprintf("<!-- keys of %s -->\n", p), "<!-- end of keys -->\n"
		before, rest, ok := strings.Cut(page, begin)
		have, after, closed := strings.Cut(rest, end)
		if !ok || !closed {
			t.Fatalf("%s: no table of %s", file, p)
		}
		want := table(keys)
		if have != want && !*update {
			t.Errorf("the table of %s is not that of its example; run: go test ./arch -run ConfigurationPage -update", p)
		}
		page = before + begin + want + end + after
	}
	if *update {
		if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	checkLiveKeys(t, page, all)
	checkTags(t, root, page)
}

// checkTags finds the keys that the examples do not show, such as those of empty lists, by the
// tags in the source.
func checkTags(t *testing.T, root, page string) {
	t.Helper()
	tag := regexp.MustCompile("`toml:\"(\\w+)")
	for _, pattern := range []string{"services/*/internal/config/*.go", "services/internal/*/config.go", "services/eventbus/internal/*/config.go"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no files: %v", pattern, err)
		}
		for _, file := range files {
			source, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			for _, m := range tag.FindAllSubmatch(source, -1) {
				if !regexp.MustCompile("[`.]" + string(m[1]) + "[`.\\]]").MatchString(page) {
					t.Errorf("the page does not name %s of %s", m[1], file)
				}
			}
		}
	}
}

// emptyByDefault are tables and lists that the examples do not show.
func emptyByDefault() []string {
	return []string{"runtime.ulimits", "image.stream_processors", "image.proxy_snapshotters", "plugins", "required.rules", "required.exempt"}
}

// checkLiveKeys checks that the keys which the page calls changeable are keys, or tables of them.
func checkLiveKeys(t *testing.T, page string, all []string) {
	t.Helper()
	_, list, ok := strings.Cut(page, "<!-- live keys -->\n")
	list, _, closed := strings.Cut(list, "<!-- end of live keys -->\n")
	live := regexp.MustCompile("`([a-z_.]+)`").FindAllStringSubmatch(list, -1)
	if !ok || !closed || len(live) == 0 {
		t.Fatal("the page has no list of the keys that can be changed while a process runs")
	}
	for _, m := range live {
		known := func(name string) bool { return name == m[1] || strings.HasPrefix(name, m[1]+".") }
		if !slices.ContainsFunc(all, known) && !slices.Contains(emptyByDefault(), m[1]) {
			t.Errorf("%s is called a key that can be changed, but it is none", m[1])
		}
	}
}
