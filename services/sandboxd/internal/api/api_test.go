package api

import (
	"math"
	"testing"
	"time"
)

func TestSeconds(t *testing.T) {
	t.Parallel()
	const century = 100 * 365 * 24 * time.Hour
	for n, want := range map[int64]time.Duration{
		-1: 0, 0: 0, 1: time.Second, 86_400: 24 * time.Hour,
		// In nanoseconds these are 290 ms, and less than nothing, after an overflow.
		18_446_744_074: century, math.MaxInt64: century,
	} {
		if got := seconds(n); got != want {
			t.Errorf("%d: %v, want %v", n, got, want)
		}
	}
}
