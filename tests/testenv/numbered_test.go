package testenv

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNumberedCheck(t *testing.T) {
	pad := strings.Repeat("0", 90)
	record := func(tag, content string) string { return "2026-01-02T03:04:05.6Z stdout " + tag + " " + content + "\n" }
	one, two := "000000000"+pad, "000000001"+pad
	other := "2026-01-02T03:04:05.6Z stderr F else\n"
	for name, c := range map[string]struct {
		files []string
		good  bool
	}{
		"in two files":     {[]string{record("F", one) + other, record("F", two)}, true},
		"cut by the files": {[]string{record("F", one) + record("P", two[:20]), record("F", two[20:])}, true},
		"lost":             {[]string{record("F", one)}, false},
		"doubled":          {[]string{record("F", one) + record("F", one)}, false},
		"swapped":          {[]string{record("F", two) + record("F", one)}, false},
		"short":            {[]string{record("F", one) + record("F", two[:50])}, false},
		"cut off":          {[]string{record("F", one) + record("F", two) + record("P", "0")}, false},
		"torn":             {[]string{record("F", one) + strings.TrimSuffix(record("F", two), "\n")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var paths []string
			for _, text := range c.files {
				path := filepath.Join(t.TempDir(), "log")
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				paths = append(paths, path)
			}
			if err := (Numbered{Length: 100}).Check("stdout", 2, paths...); (err == nil) != c.good {
				t.Error(err)
			}
		})
	}
}
