package containerio

import (
	"strings"
	"testing"
)

// tags lists the records of a log as "tag:content".
func tags(t testing.TB, log []byte) []string {
	t.Helper()
	var out []string
	for _, line := range strings.SplitAfter(string(log), "\n") {
		if line == "" {
			continue
		}
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(parts) != 4 || !strings.HasSuffix(line, "\n") {
			t.Fatalf("bad record %q", line)
		}
		out = append(out, parts[2]+":"+parts[3])
	}
	return out
}
