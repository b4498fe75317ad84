package arch

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// Durations are measured by the monotonic clock: a clock that is set must not end a time limit
// early or never. A time that was read back from a number, a text or a message, or that was
// put into another form, has lost the monotonic reading, and what is computed from it depends
// on the time of day.
func TestDurationsAreMonotonic(t *testing.T) {
	for _, p := range packages(t) {
		if p.generated() || !strings.HasPrefix(p.rel(), "services/") {
			continue
		}
		fset, files := parse(t, p)
		for _, file := range files {
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || !isDuration(call) {
					return true
				}
				for _, operand := range append(call.Args, call.Fun.(*ast.SelectorExpr).X) {
					if how := wallClock(operand); how != "" {
						t.Errorf("%s: a duration of a time that is made by %s depends on the time of day", fset.Position(call.Pos()), how)
					}
				}
				return true
			})
		}
	}
}

// isDuration says whether a call is time.Since, time.Until, or Sub of a time with one argument.
func isDuration(call *ast.CallExpr) bool {
	f, ok := call.Fun.(*ast.SelectorExpr)
	return ok && len(call.Args) == 1 && slices.Contains([]string{"Since", "Until", "Sub"}, f.Sel.Name)
}

// wallClock names the function that an operand's time has lost its monotonic reading by.
func wallClock(operand ast.Expr) string {
	call, ok := operand.(*ast.CallExpr)
	if !ok {
		return ""
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	lossy := []string{"Unix", "UnixMilli", "UnixMicro", "AsTime", "UTC", "Local", "In", "Round", "Truncate", "Date", "ModTime"}
	if slices.Contains(lossy, f.Sel.Name) {
		return f.Sel.Name
	}
	return wallClock(f.X) // such as time.Unix(…).Add(…)
}
