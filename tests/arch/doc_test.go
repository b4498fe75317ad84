package arch

import (
	"path/filepath"
	"strings"
	"testing"
)

// Each package says once what it is for.
func TestEachPackageHasOneComment(t *testing.T) {
	for _, p := range packages(t) {
		if p.generated() || len(p.GoFiles)+len(p.CgoFiles) == 0 {
			continue
		}
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + filepath.Base(p.Dir) + " "
		}
		var with []string
		_, files := parse(t, p)
		for name, file := range files {
			if file.Doc == nil {
				continue
			}
			with = append(with, name)
			if text := file.Doc.Text(); !strings.HasPrefix(strings.ReplaceAll(text, "\n", " "), want) {
				t.Errorf("%s/%s: the package comment does not begin with %q", p.rel(), name, want)
			}
		}
		if len(with) != 1 {
			t.Errorf("%s: %d package comments %v, want 1", p.rel(), len(with), with)
		}
	}
}
