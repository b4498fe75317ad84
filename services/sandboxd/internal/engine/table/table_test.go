package table

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

// The beginning of an id stands for the whole as long as it means one object.
func TestCompleteID(t *testing.T) {
	t.Parallel()
	a, b := "abc"+strings.Repeat("0", 61), "abd"+strings.Repeat("0", 61)
	known := map[string]int{a: 1, b: 2, "abd": 3}
	for prefix, tt := range map[string]struct {
		want string
		err  func(error) bool
	}{
		a:         {want: a},
		"abc":     {want: a},
		"abd0":    {want: b},
		"abd":     {want: "abd"}, // whole, though it begins another one
		"ab":      {err: errdefs.IsInvalidArgument},
		"a":       {err: errdefs.IsInvalidArgument},
		"":        {err: errdefs.IsInvalidArgument},
		"x":       {err: errdefs.IsNotFound},
		a + "0":   {err: errdefs.IsNotFound},
		"../abc":  {err: errdefs.IsNotFound},
		"abc\x00": {err: errdefs.IsNotFound},
	} {
		got, err := completeID("container", prefix, known)
		if tt.err == nil && err != nil || tt.err != nil && !tt.err(err) || got != tt.want {
			t.Errorf("%q: %q, %v", prefix, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), "container") {
			t.Errorf("%q: %v does not name the kind", prefix, err)
		}
	}
}
