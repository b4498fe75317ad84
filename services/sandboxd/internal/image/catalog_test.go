package image

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/assembly"
)

// Lists are filtered by whatever names an image; a beginning of an id that several images have
// names none.
func TestFilteredLists(t *testing.T) {
	t.Parallel()
	hex := func(begin string) string { return "sha256:" + begin + strings.Repeat("0", 64-len(begin)) }
	one, two, manifest := hex("aaaaaaaaaaaa1"), hex("aaaaaaaaaaaa2"), hex("beef")
	c := &catalog{byID: map[string]*entry{}, byName: map[string]*entry{}}
	for _, e := range []*entry{
		{Contents: &assembly.Contents{ID: one}, digests: []string{manifest}, names: []string{"docker.io/library/app:1"}},
		{Contents: &assembly.Contents{ID: two}, names: []string{"registry.example/app:1"}},
	} {
		e.shown = &criv1.Image{Id: e.ID}
		c.entries, c.byID[e.ID] = append(c.entries, e), e
		for _, name := range e.names {
			c.byName[name] = e
		}
	}
	s := new(Service)
	if _, err := s.List(t.Context(), nil); !errdefs.IsUnavailable(err) {
		t.Errorf("before the images are known: %v", err)
	}
	s.catalog.Store(c)
	all := one + " " + two
	for ref, want := range map[string]string{
		"": all, one: one, strings.TrimPrefix(two, "sha256:"): two, manifest: one,
		"app:1": one, "docker.io/library/app:1": one, "registry.example/app:1": two,
		"registry.example/app:2": "", "app": "", hex("cccc"): "", "example.com/app@" + manifest: "", // not by that name
		"aaaaaaaaaaaa": "", "aaaaaaaaaaaa1": one, "aaaaaaaaaaaa2000": two, "aaaaaaaa": "",
	} {
		list, err := s.List(t.Context(), &criv1.ImageFilter{Image: &criv1.ImageSpec{Image: ref}})
		var ids []string
		for _, img := range list {
			ids = append(ids, img.GetId())
		}
		if got := strings.Join(ids, " "); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", ref, got, err, want)
		}
	}
	if _, err := s.List(t.Context(), &criv1.ImageFilter{Image: &criv1.ImageSpec{Image: "UPPER//x"}}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("malformed: %v", err)
	}
}
