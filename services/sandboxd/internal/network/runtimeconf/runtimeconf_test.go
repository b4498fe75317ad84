package runtimeconf

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
)

func TestParseQuantity(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]float64{
		"1": 1, "10M": 10e6, "1.5k": 1500, "1Ki": 1024, "2Gi": 2 << 30, "1e6": 1e6, "1E": 1e18, "500m": 0.5,
	} {
		if got, err := parseQuantity(in); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "k", "1x", "0x10", "NaN", "Inf", "1 M", "1_0"} {
		if got, err := parseQuantity(bad); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%q: %v, %v", bad, got, err)
		}
	}
}

func TestBandwidth(t *testing.T) {
	t.Parallel()
	got, err := bandwidthOf(map[string]string{AnnotationEgress: "1M"})
	want := bandwidth{EgressRate: 1e6, EgressBurst: 4294967295}
	if err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"1", "2P", "-5M", "fast"} {
		if _, err := bandwidthOf(map[string]string{AnnotationIngress: bad}); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%q: error %v", bad, err)
		}
	}
}

func FuzzParseQuantity(f *testing.F) {
	f.Add("10M")
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseQuantity(s); err == nil && n != n {
			t.Errorf("%q is not a number", s)
		}
	})
}
