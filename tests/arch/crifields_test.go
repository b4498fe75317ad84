package arch

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// criField is a line of testdata/cri-fields.txt.
type criField struct {
	file, test string // empty if there is a reason
	reason     string
}

// TestEachFieldOfCRIRequestsIsTested walks the descriptors of the protocol: no field of a
// request may be there that nobody has thought of.
func TestEachFieldOfCRIRequestsIsTested(t *testing.T) {
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	list := readFieldList(t, filepath.Join("testdata", "cri-fields.txt"))
	fields := requestFields()
	used := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		message, _, _ := strings.Cut(name, ".")
		key := name
		if _, ok := list[key]; !ok {
			key = message + ".*"
		}
		entry, ok := list[key]
		if !ok {
			t.Errorf("%s is a field of a CRI request that testdata/cri-fields.txt does not list", name)
			continue
		}
		used[key] = true
		if entry.reason == "" {
			checkNamedTest(t, filepath.Join(root, entry.file), entry.test, name, fields[name])
		}
	}
	for key := range list {
		if !used[key] {
			t.Errorf("%s is listed but not a field of a CRI request", key)
		}
	}
}

// requestFields are the fields of all requests and of the messages in them, with their Go names.
func requestFields() map[string]string {
	out := map[string]string{}
	seen := map[protoreflect.FullName]bool{}
	var walk func(m protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] || m.IsMapEntry() {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			out[string(m.Name())+"."+string(f.Name())] = goName(string(f.Name()))
			if f.Message() != nil {
				walk(f.Message())
			}
		}
	}
	services := (&criv1.VersionRequest{}).ProtoReflect().Descriptor().ParentFile().Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			walk(methods.Get(j).Input())
		}
	}
	return out
}

func goName(field string) string {
	var out strings.Builder
	for part := range strings.SplitSeq(field, "_") {
		out.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return out.String()
}

func readFieldList(t *testing.T, file string) map[string]criField {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]criField{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, _ := strings.Cut(line, " ")
		first, second, _ := strings.Cut(rest, " ")
		entry := criField{file: first, test: second}
		if first == "-" {
			entry = criField{reason: second}
		}
		if _, twice := out[name]; twice || second == "" {
			t.Errorf("%s: bad line %q", file, line)
		}
		out[name] = entry
	}
	return out
}

// checkNamedTest checks that the test exists and that its file speaks of the field, by its
// name in Go or in the protocol.
func checkNamedTest(t *testing.T, file, test, field, goField string) {
	t.Helper()
	source, err := os.ReadFile(file)
	if err != nil {
		t.Errorf("%s: %v", field, err)
		return
	}
	parsed, err := parser.ParseFile(token.NewFileSet(), file, source, parser.SkipObjectResolution)
	if err != nil {
		t.Errorf("%s: %v", field, err)
		return
	}
	found := slices.ContainsFunc(parsed.Decls, func(d ast.Decl) bool {
		f, ok := d.(*ast.FuncDecl)
		return ok && f.Recv == nil && f.Name.Name == test && strings.HasPrefix(test, "Test")
	})
	if !found {
		t.Errorf("%s: there is no %s in %s", field, test, file)
	}
	_, name, _ := strings.Cut(field, ".")
	mention := regexp.MustCompile(`\b(Get)?(` + goField + `|` + name + `)\b`)
	if !mention.Match(source) {
		t.Errorf("%s: %s does not say %s", field, file, goField)
	}
}
