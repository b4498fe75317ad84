package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Duration is a length of time that is written as text, such as "5s" or "1h30m".
type Duration time.Duration

// Std returns the same length as the type of the standard library.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String returns the shortest text that UnmarshalText reads back as d.
func (d Duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. Negative lengths are refused.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return fmt.Errorf("%q is no duration, write for example \"5s\" or \"2m\"", text)
	}
	if v < 0 {
		return fmt.Errorf("%q is negative", text)
	}
	*d = Duration(v)
	return nil
}

// ByteSize is a number of bytes that is written with a binary unit, such as "64MiB".
type ByteSize int64

// The units that a ByteSize is written with.
const (
	KiB ByteSize = 1 << 10
	MiB ByteSize = 1 << 20
	GiB ByteSize = 1 << 30
	TiB ByteSize = 1 << 40
)

type unit struct {
	name string
	size ByteSize
}

// units returns the written units, largest first. The bare "B" comes last because
// every other name ends in it.
func units() []unit {
	return []unit{{"TiB", TiB}, {"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}, {"B", 1}}
}

// Int returns the number of bytes.
func (b ByteSize) Int() int { return int(b) }

// String returns the size in the largest unit that divides it.
func (b ByteSize) String() string {
	for _, u := range units() {
		if b != 0 && b%u.size == 0 {
			return strconv.FormatInt(int64(b/u.size), 10) + u.name
		}
	}
	return "0B"
}

// MarshalText implements encoding.TextMarshaler.
func (b ByteSize) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. The number is a whole one that
// is not negative; without a unit it counts bytes.
func (b *ByteSize) UnmarshalText(text []byte) error {
	digits, size := strings.TrimSpace(string(text)), ByteSize(1)
	for _, u := range units() {
		if rest, ok := strings.CutSuffix(digits, u.name); ok {
			digits, size = strings.TrimSpace(rest), u.size
			break
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 {
		return fmt.Errorf("%q is no size, write for example \"64MiB\" or \"1GiB\"", text)
	}
	if n > math.MaxInt64/int64(size) {
		return fmt.Errorf("%q is too large", text)
	}
	*b = ByteSize(n) * size
	return nil
}
