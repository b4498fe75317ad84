package crilog

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
		if _, err := time.Parse(time.RFC3339Nano, parts[0]); err != nil {
			t.Fatal(err)
		}
		out = append(out, parts[2]+":"+parts[3])
	}
	return out
}

func TestLines(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   []string
		want []string
	}{
		{"line", []string{"ab\n"}, []string{"F:ab"}},
		{"empty line", []string{"\n"}, []string{"F:"}},
		{"max-1", []string{"abc\n"}, []string{"F:abc"}},
		{"max", []string{"abcd\n"}, []string{"F:abcd"}},
		{"max in pieces", []string{"ab", "cd", "\n"}, []string{"F:abcd"}},
		{"max+1", []string{"abcde\n"}, []string{"P:abcd", "F:e"}},
		{"twice max", []string{"abcdefgh\n"}, []string{"P:abcd", "F:efgh"}},
		{"tail", []string{"a\nbc"}, []string{"F:a", "P:bc"}},
		{"tail of max", []string{"abcd"}, []string{"P:abcd"}},
		{"long tail", []string{"abcdefghi"}, []string{"P:abcd", "P:efgh", "P:i"}},
		{"binary", []string{"\x00\r\n\xff\xfe\n"}, []string{"F:\x00\r", "F:\xff\xfe"}},
		{"nothing", nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := NewLines(Stdout, 4)
			var log []byte
			for _, chunk := range tc.in {
				log = l.Append(log, []byte(chunk), time.Now())
			}
			log = l.Flush(log, time.Now())
			if diff := cmp.Diff(tc.want, tags(t, log)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Joined, the contents are the bytes that were written, however they came.
func FuzzLines(f *testing.F) {
	f.Add([]byte("hello\nworld"), 3, 5)
	f.Add([]byte("\n\n\x00\r\n"), 1, 1)
	f.Fuzz(func(t *testing.T, data []byte, size, limit int) {
		size, limit = max(1, size%64), max(1, limit%32)
		l := NewLines(Stderr, limit)
		var log []byte
		for rest := data; len(rest) > 0; {
			n := min(size, len(rest))
			log = l.Append(log, rest[:n], time.Now())
			if len(l.partial) > limit {
				t.Fatalf("keeps %d bytes", len(l.partial))
			}
			rest = rest[n:]
		}
		log = l.Flush(log, time.Now())
		var joined []byte
		for _, r := range tags(t, log) {
			joined = append(joined, r[2:]...)
			if r[0] == 'F' {
				joined = append(joined, '\n')
			}
		}
		if !bytes.Equal(joined, data) {
			t.Errorf("joined %q, wrote %q", joined, data)
		}
	})
}
