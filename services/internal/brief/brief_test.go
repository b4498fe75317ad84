package brief_test

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crisp-cri/crisp/services/internal/brief"
)

// Short texts stay; of long ones beginning and end are kept, and all are valid.
func TestText(t *testing.T) {
	for _, s := range []string{"", "short", strings.Repeat("ü", 4096)} {
		if got := brief.Text(s); got != s {
			t.Errorf("%.20q became %.20q", s, got)
		}
	}
	for _, s := range []string{"begin" + strings.Repeat("ü", 1<<20) + "end", "begin\xff\xfeend", "begin" + strings.Repeat("\xff", 1<<20) + "end"} {
		got := brief.Text(s)
		if len(got) > 40<<10 || !utf8.ValidString(got) || !strings.HasPrefix(got, "begin") || !strings.HasSuffix(got, "end") {
			t.Errorf("%d bytes became %d: %.20q", len(s), len(got), got)
		}
	}
}

// A status keeps its code, and an error without one stays what it is.
func TestStatus(t *testing.T) {
	long := brief.Status(status.Error(codes.NotFound, strings.Repeat("x", 1<<20)))
	if status.Code(long) != codes.NotFound || len(long.Error()) > 16<<10 {
		t.Errorf("%s, %d bytes", status.Code(long), len(long.Error()))
	}
	plain := errors.New("plain")
	for _, err := range []error{nil, plain, status.Error(codes.NotFound, "short")} {
		if got := brief.Status(err); got != err { //nolint:errorlint // the very same
			t.Errorf("%v became %v", err, got)
		}
	}
}
