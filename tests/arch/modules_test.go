package arch

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/modfile"
)

func readModule(t *testing.T, m module) *modfile.File {
	t.Helper()
	data, err := os.ReadFile(m.GoMod)
	if err != nil {
		t.Fatal(err)
	}
	file, err := modfile.Parse(m.GoMod, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// All modules use the same version of what they share.
func TestModulesAgreeOnVersions(t *testing.T) {
	type use struct{ version, module string }
	seen := map[string]use{}
	language := use{}
	for _, m := range modules(t) {
		file := readModule(t, m)
		if language.version == "" {
			language = use{file.Go.Version, m.Path}
		}
		if file.Go.Version != language.version {
			t.Errorf("%s: go %s, but %s has go %s", m.Path, file.Go.Version, language.module, language.version)
		}
		if file.Toolchain != nil {
			t.Errorf("%s: has a toolchain line, which the others have not", m.Path)
		}
		for _, r := range file.Require {
			first, known := seen[r.Mod.Path]
			if !known {
				seen[r.Mod.Path] = use{r.Mod.Version, m.Path}
				continue
			}
			if first.version != r.Mod.Version {
				t.Errorf("%s: %s in %s, but %s in %s", r.Mod.Path, r.Mod.Version, m.Path, first.version, first.module)
			}
		}
	}
}

// Modules are replaced only by their siblings in the workspace.
func TestReplacementsStayInTheWorkspace(t *testing.T) {
	all := modules(t)
	for _, m := range all {
		for _, r := range readModule(t, m).Replace {
			target := filepath.Join(m.Dir, r.New.Path)
			if r.New.Version != "" || !slices.ContainsFunc(all, func(o module) bool { return o.Dir == target && o.Path == r.Old.Path }) {
				t.Errorf("%s: replaces %s by %s, which is not that module of the workspace", m.Path, r.Old.Path, r.New.Path)
			}
		}
	}
}

// The copies of other projects' proto files are what their modules hold.
func TestThirdPartyProtosEqualTheirModules(t *testing.T) {
	var root string
	for _, m := range modules(t) {
		if m.Path == project+"/proto" {
			root = m.Dir
		}
	}
	folder := filepath.Join(root, "third_party")
	copies := 0
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".proto" {
			return err
		}
		copies++
		rel, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		// The name under which the CRI's Go package registers has a prefix of its own.
		name := strings.TrimPrefix(filepath.ToSlash(rel), "staging/src/")
		original := originalOf(t, root, name)
		if original == "" {
			t.Errorf("%s: no required module holds it", rel)
			return nil
		}
		mine, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		theirs, err := os.ReadFile(original)
		if err != nil {
			return err
		}
		if !bytes.Equal(mine, theirs) {
			t.Errorf("%s differs from %s", rel, original)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if copies == 0 {
		t.Error("no copies were found")
	}
}

// originalOf finds the file of that name in the module whose path begins it, or,
// where a project registers its files by their path inside the module, in the
// one required module that has a file there.
func originalOf(t *testing.T, dir, name string) string {
	t.Helper()
	for _, r := range readModule(t, module{GoMod: filepath.Join(dir, "go.mod")}).Require {
		if r.Indirect {
			continue
		}
		at := strings.TrimSpace(goCommand(t, dir, "list", "-m", "-f", "{{.Dir}}", r.Mod.Path))
		path := filepath.Join(at, strings.TrimPrefix(name, r.Mod.Path+"/"))
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}
