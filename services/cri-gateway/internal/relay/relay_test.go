package relay_test

import (
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/cri-gateway/internal/relay"
)

// source gives pieces and then an error.
type source struct {
	pieces [][]int
	end    error
}

func (s *source) Recv() ([]int, error) {
	if len(s.pieces) == 0 {
		return nil, s.end
	}
	piece := s.pieces[0]
	s.pieces = s.pieces[1:]
	return piece, nil
}

func same(piece []int) []int { return piece }

func TestCopy(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for name, test := range map[string]struct {
		from source
		want [][]int
		err  error
	}{
		"nothing":           {from: source{end: io.EOF}},
		"pieces":            {from: source{pieces: [][]int{{1, 2}, {3}}, end: io.EOF}, want: [][]int{{1, 2}, {3}}},
		"empty pieces":      {from: source{pieces: [][]int{{}, {3}, nil}, end: io.EOF}, want: [][]int{{3}}},
		"broken in between": {from: source{pieces: [][]int{{1}}, end: broken}, want: [][]int{{1}}, err: broken},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got [][]int
			err := relay.Copy(&test.from, same, func(items []int) error {
				got = append(got, items)
				return nil
			})
			if !errors.Is(err, test.err) {
				t.Errorf("error %v, want %v", err, test.err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("sent (-want +got):\n%s", diff)
			}
		})
	}
}

// A piece is on its way before the next one is asked for, and a reader that is gone ends it.
func TestCopyStopsWhenTheReaderIsGone(t *testing.T) {
	t.Parallel()
	gone := errors.New("gone")
	from := &source{pieces: [][]int{{1}, {2}}, end: io.EOF}
	err := relay.Copy(from, same, func([]int) error { return gone })
	if !errors.Is(err, gone) || len(from.pieces) != 1 {
		t.Errorf("error %v with %d pieces left, want %v with 1", err, len(from.pieces), gone)
	}
}
