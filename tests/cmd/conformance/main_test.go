package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const report = `[{"SpecReports":[
 {"LeafNodeType":"BeforeSuite","State":"passed"},
 {"ContainerHierarchyTexts":["group"],"LeafNodeType":"It","LeafNodeText":"works","State":"passed"},
 {"ContainerHierarchyTexts":["group"],"LeafNodeType":"It","LeafNodeText":"fails","State":"panicked","Failure":{"Message":"bang\nloud","Location":{"FileName":"/x/y.go","LineNumber":7}}},
 {"ContainerHierarchyTexts":["other"],"LeafNodeType":"It","LeafNodeText":"left out","State":"skipped"},
 {"ContainerHierarchyTexts":["other"],"LeafNodeType":"It","LeafNodeText":"cannot","State":"skipped","Failure":{"Message":"no such thing here"}}
]}]`

func TestConclusionCountsAndNames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(path, []byte(report), 0o600); err != nil {
		t.Fatal(err)
	}
	specs, err := readReport(path)
	if err != nil {
		t.Fatal(err)
	}
	for expression, want := range map[string]error{"": errFailed, "other": nil} {
		var out strings.Builder
		err := conclude(specs, regexp.MustCompile(expression), false, &out)
		if !errors.Is(err, want) {
			t.Errorf("wanted %q: %v, want %v", expression, err, want)
		}
		if !strings.HasSuffix(out.String(), "\n1 passed, 1 failed, 1 skipped\n") || !strings.Contains(out.String(), "group fails\n    y.go:7: bang loud\n") {
			t.Errorf("output is %q", out.String())
		}
	}
	other := []spec{{LeafNodeText: "works", ContainerHierarchyTexts: []string{"group"}, State: "failed"}, {LeafNodeText: "cannot", ContainerHierarchyTexts: []string{"other"}, State: "passed"}}
	for _, runs := range [][][]spec{{specs, other}, {other, specs}} {
		if got := summary(worst(runs)); got != "0 passed, 2 failed, 1 skipped" {
			t.Errorf("of both runs: %s", got)
		}
	}
	if err := conclude(nil, regexp.MustCompile(""), false, &strings.Builder{}); !errors.Is(err, errNoRun) {
		t.Errorf("without specs: %v, want %v", err, errNoRun)
	}
}
