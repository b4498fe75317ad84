package arch

import (
	"go/ast"
	"go/token"
	"strings"
	"testing"
)

// No code runs at import time, and nothing at package level changes.
func TestNoInitAndNoMutablePackageVariables(t *testing.T) {
	for _, p := range packages(t) {
		// Packages for tests only may keep test flags and what is built once.
		forTests := p.Name == "testkit" || strings.HasSuffix(p.Name, "test")
		if p.generated() || forTests || !strings.HasPrefix(p.rel(), "services/") {
			continue
		}
		fset, files := parse(t, p)
		written := assigned(files)
		for _, file := range files {
			for _, decl := range file.Decls {
				switch d := decl.(type) {
				case *ast.FuncDecl:
					if d.Recv == nil && d.Name.Name == "init" {
						t.Errorf("%s: init function", fset.Position(d.Pos()))
					}
				case *ast.GenDecl:
					if d.Tok == token.VAR {
						checkVariables(t, fset, d, written)
					}
				}
			}
		}
	}
}

func checkVariables(t *testing.T, fset *token.FileSet, d *ast.GenDecl, written map[string]bool) {
	t.Helper()
	for _, s := range d.Specs {
		spec, ok := s.(*ast.ValueSpec)
		if !ok {
			continue
		}
		for i, name := range spec.Names {
			if name.Name == "_" || embedded(d.Doc) || embedded(spec.Doc) {
				continue
			}
			var value ast.Expr
			if i < len(spec.Values) {
				value = spec.Values[i]
			}
			switch {
			case value == nil:
				t.Errorf("%s: package variable %s without a value can only be meant to change", fset.Position(name.Pos()), name.Name)
			case !constantLike(value):
				t.Errorf("%s: package variable %s holds something that can change", fset.Position(name.Pos()), name.Name)
			case written[name.Name]:
				t.Errorf("%s: package variable %s is changed", fset.Position(name.Pos()), name.Name)
			}
		}
	}
}

func embedded(doc *ast.CommentGroup) bool {
	if doc == nil {
		return false
	}
	for _, c := range doc.List {
		if strings.HasPrefix(c.Text, "//go:embed ") {
			return true
		}
	}
	return false
}

// constantLike says whether an initial value is one that only assignment could
// change: a sentinel error, a compiled expression, a literal or a table of them.
func constantLike(value ast.Expr) bool {
	switch v := value.(type) {
	case *ast.BasicLit, *ast.Ident, *ast.SelectorExpr:
		return true
	case *ast.BinaryExpr:
		return constantLike(v.X) && constantLike(v.Y)
	case *ast.UnaryExpr:
		return v.Op != token.AND && constantLike(v.X)
	case *ast.CompositeLit:
		selector, ok := v.Type.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		from, ok := selector.X.(*ast.Ident)
		if ok && from.Name == "sync" {
			return selector.Sel.Name == "Pool"
		}
		return ok && from.Name != "atomic"
	case *ast.CallExpr:
		return pure(v.Fun)
	default:
		return false
	}
}

// pure lists the functions whose result nobody can change.
func pure(fun ast.Expr) bool {
	if index, ok := fun.(*ast.IndexExpr); ok {
		fun = index.X
	}
	switch f := fun.(type) {
	case *ast.SelectorExpr:
		from, ok := f.X.(*ast.Ident)
		if !ok {
			return false
		}
		switch from.Name + "." + f.Sel.Name {
		case "errors.New", "fmt.Errorf", "regexp.MustCompile", "strings.NewReplacer", "netip.MustParsePrefix", "netip.MustParseAddr", "time.Duration":
			return true
		}
		return false
	case *ast.ArrayType:
		return true // A conversion.
	default:
		return false
	}
}

// assigned gives the names that the package's functions assign to, take the
// address of, or change an element of.
func assigned(files map[string]*ast.File) map[string]bool {
	names := map[string]bool{}
	add := func(target ast.Expr) {
		for {
			switch v := target.(type) {
			case *ast.IndexExpr:
				target = v.X
			case *ast.SelectorExpr:
				target = v.X
			case *ast.ParenExpr:
				target = v.X
			case *ast.Ident:
				names[v.Name] = true
				return
			default:
				return
			}
		}
	}
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			switch v := n.(type) {
			case *ast.AssignStmt:
				if v.Tok != token.DEFINE {
					for _, target := range v.Lhs {
						add(target)
					}
				}
			case *ast.IncDecStmt:
				add(v.X)
			case *ast.UnaryExpr:
				if v.Op == token.AND {
					if id, ok := v.X.(*ast.Ident); ok {
						add(id)
					}
				}
			case *ast.CallExpr:
				if id, ok := v.Fun.(*ast.Ident); ok && (id.Name == "delete" || id.Name == "clear") && len(v.Args) > 0 {
					add(v.Args[0])
				}
			}
			return true
		})
	}
	return names
}
