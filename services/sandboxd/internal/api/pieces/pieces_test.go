package pieces

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestStreamSendsPiecesWhileTheListIsMade(t *testing.T) {
	t.Parallel()
	big := &criv1.Container{Id: strings.Repeat("x", pieceBytes)}
	small := &criv1.Container{Id: "s"}
	many := make([]*criv1.Container, 2*pieceItems+1)
	for i := range many {
		many[i] = small
	}
	for name, test := range map[string]struct {
		items []*criv1.Container
		want  []int
	}{
		"none": {},
		"one":  {items: []*criv1.Container{small}, want: []int{1}},
		"many": {items: many, want: []int{pieceItems, pieceItems, 1}},
		"big":  {items: []*criv1.Container{small, big, big, small}, want: []int{1, 1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var sent []int
			made := 0
			err := Stream(func(do func(*criv1.Container) error) error {
				for _, item := range test.items {
					made++
					if err := do(item); err != nil {
						return err
					}
				}
				return nil
			}, func(part []*criv1.Container) error {
				if len(sent) == 0 && len(test.want) > 1 && made == len(test.items) {
					t.Error("the first piece was sent only when the list was complete")
				}
				sent = append(sent, len(part))
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, sent); diff != "" {
				t.Errorf("pieces (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStreamEndsWithItsReader(t *testing.T) {
	t.Parallel()
	gone := errors.New("gone")
	made := 0
	err := Stream(func(do func(*criv1.Container) error) error {
		for {
			made++
			if err := do(&criv1.Container{}); err != nil {
				return err
			}
		}
	}, func([]*criv1.Container) error { return gone })
	if !errors.Is(err, gone) || made > pieceItems+1 {
		t.Errorf("error %v after %d items", err, made)
	}
}
