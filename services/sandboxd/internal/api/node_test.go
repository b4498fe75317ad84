package api

import (
	"context"
	"slices"
	"testing"
)

// The end of a recovery is told whenever it comes, also while it is being told that there is none.
func TestEndOfARecoveryIsTold(t *testing.T) {
	ended := make(chan struct{})
	close(ended)
	for name, c := range map[string]struct {
		recovered chan struct{}
		endAt     int // the message during which the recovery ends
		want      []bool
	}{
		"before":           {recovered: ended, want: []bool{true}},
		"while it is told": {recovered: make(chan struct{}), endAt: 1, want: []bool{false, true}},
	} {
		var told []bool
		err := tellRecovery(t.Context(), c.recovered, func(recovered bool) error {
			if told = append(told, recovered); len(told) == c.endAt {
				close(c.recovered)
			}
			return nil
		})
		if err != nil || !slices.Equal(told, c.want) {
			t.Errorf("%s: told %v, %v", name, told, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := tellRecovery(ctx, make(chan struct{}), func(bool) error { cancel(); return nil })
	if err != nil {
		t.Errorf("of a gateway that is gone: %v", err)
	}
}
