package cgroup

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// number reads a file that holds one number; "max" is the largest one. What cannot be read
// is 0: metrics are what there is.
func number(dir, file string) uint64 {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0
	}
	return parse(strings.TrimSpace(string(data)))
}

func parse(s string) uint64 {
	if s == "max" || s == "-1" {
		return math.MaxUint64
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// table reads a file of lines with a key and a number.
func table(dir, file string) map[string]uint64 {
	data, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return nil
	}
	out := map[string]uint64{}
	for line := range strings.Lines(string(data)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			out[key] = parse(value)
		}
	}
	return out
}
