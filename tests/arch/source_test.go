package arch

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const project = "github.com/crisp-cri/crisp"

// pkg is what `go list` says of a package.
type pkg struct {
	ImportPath, Name, Dir     string
	GoFiles, CgoFiles         []string
	Imports                   []string
	TestImports, XTestImports []string
	module                    string
}

type module struct {
	Path, Dir, GoMod string
}

// generated packages are written by tools and follow their rules.
func (p pkg) generated() bool { return strings.HasPrefix(p.ImportPath, project+"/proto/gen") }

// rel is the import path without the project's own path.
func (p pkg) rel() string { return strings.TrimPrefix(p.ImportPath, project+"/") }

func goCommand(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Fatalf("go %s in %s: %v: %s", strings.Join(args, " "), dir, err, exit.Stderr)
		}
		t.Fatal(err)
	}
	return string(out)
}

func decodeAll[T any](t *testing.T, text string) []T {
	t.Helper()
	var all []T
	decoder := json.NewDecoder(strings.NewReader(text))
	for {
		var one T
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, one)
	}
}

// modules are the members of the workspace.
func modules(t *testing.T) []module {
	t.Helper()
	found := decodeAll[module](t, goCommand(t, ".", "list", "-m", "-json=Path,Dir,GoMod"))
	if len(found) < 2 {
		t.Fatalf("the workspace has only %v; is the workspace file in use?", found)
	}
	return found
}

// source caches the packages, since all tests want them.
type source struct {
	once     sync.Once
	packages []pkg
}

var cached source

// packages are all packages of the workspace, with the files of the integration
// tests among their tests.
func packages(t *testing.T) []pkg {
	t.Helper()
	cached.once.Do(func() {
		for _, m := range modules(t) {
			out := goCommand(t, m.Dir, "list", "-e", "-tags=integration", "-json=ImportPath,Name,Dir,GoFiles,CgoFiles,Imports,TestImports,XTestImports", "./...")
			for _, p := range decodeAll[pkg](t, out) {
				p.module = m.Path
				cached.packages = append(cached.packages, p)
			}
		}
	})
	if len(cached.packages) == 0 {
		t.Fatal("no packages were found")
	}
	return cached.packages
}

// parse reads the non-test files of a package.
func parse(t *testing.T, p pkg) (*token.FileSet, map[string]*ast.File) {
	t.Helper()
	fset := token.NewFileSet()
	files := map[string]*ast.File{}
	for _, name := range slices.Concat(p.GoFiles, p.CgoFiles) {
		file, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files[name] = file
	}
	return fset, files
}
