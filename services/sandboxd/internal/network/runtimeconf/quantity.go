package runtimeconf

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// suffixes of Kubernetes quantities that a bandwidth may have.
var suffixes = []struct {
	name   string
	factor float64
}{
	{"Ki", 1 << 10},
	{"Mi", 1 << 20},
	{"Gi", 1 << 30},
	{"Ti", 1 << 40},
	{"Pi", 1 << 50},
	{"Ei", 1 << 60},
	{"m", 1e-3},
	{"k", 1e3},
	{"M", 1e6},
	{"G", 1e9},
	{"T", 1e12},
	{"P", 1e15},
	{"E", 1e18},
}

// parseQuantity reads a number with a decimal or binary suffix, or an exponent, such as
// "10M" or "1e6".
func parseQuantity(s string) (float64, error) {
	digits, factor := s, 1.0
	for _, x := range suffixes {
		if rest, ok := strings.CutSuffix(s, x.name); ok {
			digits, factor = rest, x.factor
			break
		}
	}
	n, err := strconv.ParseFloat(digits, 64)
	if err != nil || math.IsNaN(n) || math.IsInf(n, 0) || strings.ContainsAny(digits, "xX_pP") {
		return 0, fmt.Errorf("%q is not a quantity: %w", s, errdefs.ErrInvalidArgument)
	}
	return n * factor, nil
}
