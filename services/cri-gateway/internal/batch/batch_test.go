package batch

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func images(n, size int) []*criv1.Image {
	list := make([]*criv1.Image, n)
	for i := range list {
		list[i] = &criv1.Image{Id: strings.Repeat("x", size)}
	}
	return list
}

func TestSend(t *testing.T) {
	for _, tt := range []struct {
		name  string
		items []*criv1.Image
		want  []int
	}{
		{"nothing", nil, nil},
		{"one", images(1, 10), []int{1}},
		{"just one piece", images(256, 1), []int{256}},
		{"by count", images(600, 1), []int{256, 256, 88}},
		{"by size", images(5, 400<<10), []int{2, 2, 1}},
		{"large ones alone", images(3, 2<<20), []int{1, 1, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []int
			err := Send(tt.items, func(part []*criv1.Image) error {
				got = append(got, len(part))
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("pieces (-want +got):\n%s", diff)
			}
		})
	}
	broken := errors.New("broken")
	if err := Send(images(2, 2<<20), func([]*criv1.Image) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("Send: %v, want the error of send", err)
	}
}
