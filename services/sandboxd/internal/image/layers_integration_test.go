//go:build integration

package image

import (
	"context"
	"crypto/rand"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	"go.opentelemetry.io/otel/trace/noop"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/imagetest"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/image/storage"
)

type file = imagetest.File

func text(name, body string) file { return file{Name: name, Body: body} }
func dir(name string) file        { return file{Name: name, Type: '5'} }
func link(name, to string) file   { return file{Name: name, Type: '2', Link: to} }
func hide(name string) file {
	parent, base := filepath.Split(name)
	return file{Name: parent + ".wh." + base}
}
func opaque(name string) file { return file{Name: name + "/.wh..wh..opq"} }

func many(n int) []file {
	out := []file{dir("d/")}
	for i := range n {
		out = append(out, text(fmt.Sprintf("d/%d", i), ""))
	}
	return out
}

// tree reads an image as a container would see it: folders end in "/", links in "@target".
func (n *node) tree(ref string) map[string]string {
	n.t.Helper()
	img, err := n.Resolve(n.t.Context(), ref)
	if err != nil {
		n.t.Fatal(err)
	}
	ctx := n.st.Context(n.t.Context())
	out := map[string]string{}
	err = n.st.ReadOnly(ctx, img.Snapshotter, img.ChainID, func(mounts []mount.Mount) error {
		return mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
			return filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
				if err != nil || path == root {
					return err
				}
				name := strings.TrimPrefix(path, root+"/")
				switch {
				case e.IsDir():
					out[name+"/"] = ""
				case e.Type() == fs.ModeSymlink:
					to, err := os.Readlink(path)
					out[name] = "@" + to
					return err
				case e.Type().IsRegular():
					data, err := os.ReadFile(path)
					out[name] = string(data)
					return err
				default:
					out[name] = e.Type().String()
				}
				return nil
			})
		})
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// Whiteouts hide what is below their layer and nothing else, wherever in the layer they
// stand, with every snapshotter.
func TestWhiteouts(t *testing.T) {
	base := []file{dir("d/"), text("d/a", "1"), dir("d/sub/"), text("d/sub/x", "1"), text("f", "1"), link("l", "d")}
	with := func(change map[string]string, without ...string) map[string]string {
		out := map[string]string{"d/": "", "d/a": "1", "d/sub/": "", "d/sub/x": "1", "f": "1", "l": "@d"}
		maps.Copy(out, change)
		for _, w := range without {
			delete(out, w)
		}
		return out
	}
	below := func(name string) []string {
		all := []string{"d/", "d/a", "d/sub/", "d/sub/x"}
		var out []string
		for _, a := range all {
			if strings.HasPrefix(a, name) {
				out = append(out, a)
			}
		}
		return out
	}
	tests := map[string]struct {
		layers [][]file
		want   map[string]string
	}{
		"file":                            {[][]file{{hide("f")}}, with(nil, "f")},
		"folder":                          {[][]file{{hide("d")}}, with(nil, below("d/")...)},
		"nothing":                         {[][]file{{hide("none"), hide("d/none"), hide("none/none")}}, with(map[string]string{"none/": ""})},
		"twice":                           {[][]file{{hide("f"), hide("f")}, {hide("f")}}, with(nil, "f")},
		"file before its successor":       {[][]file{{hide("f"), text("f", "2")}}, with(map[string]string{"f": "2"})},
		"file after its successor":        {[][]file{{text("f", "2"), hide("f")}}, with(map[string]string{"f": "2"})},
		"link before its successor":       {[][]file{{hide("f"), link("f", "d/a")}}, with(map[string]string{"f": "@d/a"})},
		"link after its successor":        {[][]file{{link("f", "d/a"), hide("f")}}, with(map[string]string{"f": "@d/a"})},
		"link of below":                   {[][]file{{hide("l")}}, with(nil, "l")},
		"folder before its successor":     {[][]file{{hide("d"), dir("d/"), text("d/b", "2")}}, with(map[string]string{"d/": "", "d/b": "2"}, below("d/")[1:]...)},
		"folder after its successor":      {[][]file{{dir("d/"), text("d/b", "2"), hide("d")}}, with(map[string]string{"d/": "", "d/b": "2"}, below("d/")[1:]...)},
		"folder before implied successor": {[][]file{{hide("d"), text("d/sub/b", "2")}}, with(map[string]string{"d/sub/b": "2"}, "d/a", "d/sub/x")},
		"folder after implied successor":  {[][]file{{text("d/sub/b", "2"), hide("d")}}, with(map[string]string{"d/sub/b": "2"}, "d/a", "d/sub/x")},
		"opaque first":                    {[][]file{{dir("d/"), opaque("d"), text("d/b", "2")}}, with(map[string]string{"d/b": "2"}, "d/a", "d/sub/", "d/sub/x")},
		"opaque last":                     {[][]file{{dir("d/"), text("d/b", "2"), text("d/sub/y", "2"), opaque("d")}}, with(map[string]string{"d/b": "2", "d/sub/y": "2"}, "d/a", "d/sub/x")},
		"opaque before its folder":        {[][]file{{opaque("d"), dir("d/"), text("d/b", "2")}}, with(map[string]string{"d/b": "2"}, "d/a", "d/sub/", "d/sub/x")},
		"opaque and whiteouts":            {[][]file{{hide("d/a"), opaque("d"), hide("d/sub"), text("d/b", "2")}}, with(map[string]string{"d/b": "2"}, "d/a", "d/sub/", "d/sub/x")},
		"opaque instead of a file":        {[][]file{{opaque("f"), text("f/b", "2")}}, with(map[string]string{"f/": "", "f/b": "2"}, "f")},
		"opaque folder instead of a file": {[][]file{{dir("f/"), text("f/b", "2"), opaque("f")}}, with(map[string]string{"f/": "", "f/b": "2"}, "f")},
		"opaque root":                     {[][]file{{{Name: ".wh..wh..opq"}, text("n", "2"), text("d/b", "2")}}, map[string]string{"n": "2", "d/": "", "d/b": "2"}},
		"opaque root last":                {[][]file{{text("n", "2"), text("d/b", "2"), {Name: "./.wh..wh..opq"}}}, map[string]string{"n": "2", "d/": "", "d/b": "2"}},
		"file instead of a folder":        {[][]file{{text("d", "2")}, {hide("d"), dir("d/")}}, with(map[string]string{"d/": ""}, below("d/")[1:]...)},
		"folder instead of a file":        {[][]file{{dir("f/"), text("f/x", "2")}}, with(map[string]string{"f/": "", "f/x": "2"}, "f")},
		"hidden and back":                 {[][]file{{hide("d")}, {dir("d/"), text("d/b", "3")}}, with(map[string]string{"d/": "", "d/b": "3"}, below("d/")[1:]...)},
		"notes of a union file system":    {[][]file{{{Name: ".wh..wh.aufs"}, dir(".wh..wh.plnk/"), text("f", "2")}}, with(map[string]string{"f": "2"})},
		"a device that overlayfs reads":   {[][]file{{{Name: "f", Type: '3'}}}, with(nil)},
	}
	for _, snapshotter := range []string{storage.Overlay, storage.Native, storage.Erofs} {
		n := newNode(t, func(_ *Config, sc *storage.Config) { sc.Snapshotter = snapshotter })
		reg := imagetest.NewRegistry(t)
		i := 0
		for name, c := range tests {
			t.Run(snapshotter+" "+name, func(t *testing.T) {
				n := &node{Service: n.Service, t: t, root: n.root, st: n.st}
				layers := []v1.Layer{imagetest.Layer(t, base...)}
				for _, l := range c.layers {
					layers = append(layers, imagetest.Layer(t, l...))
				}
				i++
				ref := reg.Push(t, fmt.Sprintf("wh:%d", i), imagetest.Image(t, v1.Config{}, layers...))
				n.mustPull(ref)
				if diff := cmp.Diff(c.want, n.tree(ref)); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	}
}

// A whiteout of a large folder hides all of it.
func TestWhiteoutOfManyFiles(t *testing.T) {
	n := newNode(t, nil)
	ref := imagetest.NewRegistry(t).Push(t, "many:1", imagetest.Image(t, v1.Config{},
		imagetest.Layer(t, many(10_000)...), imagetest.Layer(t, hide("d"), text("f", "2"))))
	n.mustPull(ref)
	if diff := cmp.Diff(map[string]string{"f": "2"}, n.tree(ref)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Markers without a name are refused and delete nothing.
func TestMalformedWhiteouts(t *testing.T) {
	for _, snapshotter := range []string{storage.Overlay, storage.Native, storage.Erofs} {
		for _, name := range []string{".wh.", ".wh..", ".wh...", "d/.wh.", "d/.wh..", "d/.wh..."} {
			t.Run(snapshotter+" "+name, func(t *testing.T) {
				n := newNode(t, func(_ *Config, sc *storage.Config) { sc.Snapshotter = snapshotter })
				ref := imagetest.NewRegistry(t).Push(t, "bad:1", imagetest.Image(t, v1.Config{},
					imagetest.Layer(t, dir("d/"), text("d/a", "1")), imagetest.Layer(t, file{Name: name})))
				if _, err := n.pull(ref); err == nil {
					t.Errorf("pulled: %v", n.tree(ref))
				}
				n.wantEmpty()
			})
		}
	}
}

// Whatever a layer has for names and links, nothing outside of its root changes or shows.
func TestLayersThatLeaveTheRoot(t *testing.T) {
	outside := t.TempDir()
	mark := filepath.Join(outside, "mark")
	if err := os.WriteFile(mark, []byte("of the node"), 0o640); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 20) + strings.TrimPrefix(outside, "/")
	evil := map[string][][]file{
		"names":                  {{text("../../x", "evil"), text(up+"/mark", "evil"), text("/"+up+"/new", "evil")}},
		"absolute name":          {{text(mark, "evil")}},
		"link in the same layer": {{link("d", outside), text("d/mark", "evil"), text("d/new", "evil")}},
		"relative link":          {{link("d", up), text("d/mark", "evil")}},
		"link in the next layer": {{link("d", outside)}, {text("d/mark", "evil"), hide("d/mark")}},
		"folder over link":       {{link("d", outside)}, {dir("d/"), text("d/mark", "evil")}},
		"whiteout below link":    {{link("d", outside), hide("d/mark"), opaque("d")}},
		"hard link up":           {{file{Name: "h", Type: '1', Link: up + "/mark"}, text("h", "evil")}},
		"hard link to link":      {{link("l", mark), file{Name: "h", Type: '1', Link: "l"}, file{Name: "h", Body: "evil", Mode: 0o777}}},
		"hard link through":      {{link("d", outside), file{Name: "h", Type: '1', Link: "d/mark"}}},
		"mode of a link":         {{link("l", mark), file{Name: "l", Type: '2', Link: mark, Mode: 0o777, UID: 9}}},
		"file over link":         {{link("l", mark)}, {text("l", "evil")}},
		"link chain":             {{link("a", "b"), link("b", outside), text("a/mark", "evil")}},
		"link loop":              {{link("a", "b"), link("b", "a"), text("a/x", "evil")}},
		"long name":              {{text(strings.Repeat("n", 5000), "x")}},
		"odd names":              {{text("a\nb", "x"), text("\xff\xfe", "x"), text("", "x"), text(".", "x"), dir("./")}},
		"deep":                   {{dir(strings.Repeat("d/", 5_000))}},
		"device":                 {{file{Name: "dev", Type: '3'}, file{Name: "fifo", Type: '6'}}},
		"overlay notes of link":  {{dir("d/")}, {link("d", outside)}, {dir("d/"), opaque("d"), text("d/mark", "evil")}},
	}
	for _, snapshotter := range []string{storage.Overlay, storage.Native, storage.Erofs} {
		shared := newNode(t, func(_ *Config, sc *storage.Config) { sc.Snapshotter = snapshotter })
		reg := imagetest.NewRegistry(t)
		for name, layers := range evil {
			t.Run(snapshotter+" "+name, func(t *testing.T) {
				n := &node{Service: shared.Service, t: t, root: shared.root, st: shared.st}
				var made []v1.Layer
				for _, l := range layers {
					made = append(made, imagetest.Layer(t, l...))
				}
				ref := reg.Push(t, "evil:"+strings.NewReplacer(" ", "-").Replace(name), imagetest.Image(t, v1.Config{}, made...))
				_, err := n.pull(ref)
				if err == nil {
					for path, body := range n.tree(ref) {
						if body == "of the node" {
							t.Errorf("%s shows a file of the node", path)
						}
					}
					err = n.Remove(t.Context(), &criv1.ImageSpec{Image: ref})
					if err != nil {
						t.Error(err)
					}
				}
				n.wantEmpty()
				left, _ := os.ReadDir(outside)
				data, err := os.ReadFile(mark)
				fi, statErr := os.Stat(mark)
				if len(left) != 1 || err != nil || statErr != nil || string(data) != "of the node" || fi.Mode() != 0o640 {
					t.Fatalf("the node has changed: %v %q %v %v", left, data, fi.Mode(), err)
				}
			})
		}
	}
}

// Owner and mode bits come in one piece.
func TestSetuidSurvives(t *testing.T) {
	n := newNode(t, nil)
	ref := imagetest.NewRegistry(t).Push(t, "suid:1", imagetest.Image(t, v1.Config{},
		imagetest.Layer(t, file{Name: "s", Body: "x", Mode: 0o4755, UID: 7}, file{Name: "g/", Type: '5', Mode: 0o2775, UID: 7})))
	n.mustPull(ref)
	img, err := n.Resolve(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	ctx := n.st.Context(t.Context())
	err = n.st.ReadOnly(ctx, img.Snapshotter, img.ChainID, func(mounts []mount.Mount) error {
		return mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
			for name, want := range map[string]fs.FileMode{"s": fs.ModeSetuid | 0o755, "g": fs.ModeDir | fs.ModeSetgid | 0o775} {
				if fi, err := os.Stat(filepath.Join(root, name)); err != nil || fi.Mode() != want {
					t.Errorf("%s: %v %v", name, fi.Mode(), err)
				}
			}
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Layers are extracted before those below them have arrived, as many at a time as configured.
func TestLayersAreExtractedSideBySide(t *testing.T) {
	n := newNode(t, nil)
	if n.st.DefaultSnapshotter() != storage.Overlay {
		testkit.Lacks(t, "overlayfs")
	}
	reg := imagetest.NewRegistry(t)
	lower := imagetest.Layer(t, file{Name: "d/", Type: '5', Mode: 0o2750, UID: 7}, text("d/a", "lower"), text("gone", "x"))
	img := imagetest.Image(t, v1.Config{}, lower,
		imagetest.Layer(t, text("d/b", "upper"), hide("gone"), hide("never")), imagetest.Layer(t, file{Name: "link", Type: '1', Link: "d/a"}))
	ref := reg.Push(t, "side:1", img)
	held, err := lower.Digest()
	if err != nil {
		t.Fatal(err)
	}
	extracted := make(chan struct{})
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, held.String()) {
			select {
			case <-extracted:
			case <-r.Context().Done():
			}
		}
		next.ServeHTTP(w, r)
	})
	pulled := make(chan error, 1)
	go func() {
		_, err := n.pull(ref)
		pulled <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		found, _ := filepath.Glob(filepath.Join(n.root, storage.Overlay, "snapshots", "*", "fs", "d", "b"))
		if len(found) != 1 {
			return fmt.Errorf("the upper layer is at %v", found)
		}
		return nil
	})
	close(extracted)
	if err := testkit.Receive(t, pulled); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"d/": "", "d/a": "lower", "d/b": "upper", "link": "lower"}
	if diff := cmp.Diff(want, n.tree(ref)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	last := n.steps[len(n.steps)-1]
	if last.GetLayersUnpacked() != 3 {
		t.Errorf("told of at the end: %v", last)
	}
}

// A layer that cannot be extracted ends the pull, however long others take to arrive.
func TestBrokenLayerEndsTheOthers(t *testing.T) {
	n := newNode(t, nil)
	reg := imagetest.NewRegistry(t)
	slow := imagetest.Layer(t, text("slow", "x"))
	held, err := slow.Digest()
	if err != nil {
		t.Fatal(err)
	}
	img := imagetest.Image(t, v1.Config{}, slow,
		imagetest.RawLayer([]byte("no archive"), digest.FromString("no archive")), imagetest.Layer(t, text("f", "x")))
	ref := reg.Push(t, "broken:1", img)
	reg.Break(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, held.String()) {
			<-r.Context().Done()
			return
		}
		next.ServeHTTP(w, r)
	})
	if _, err := n.pull(ref); !errdefs.IsDataLoss(err) {
		t.Errorf("error %v", err)
	}
	n.wantEmpty()
}

// BenchmarkExtraction pulls an image of eight layers that are mostly computing to extract.
func BenchmarkExtraction(b *testing.B) {
	reg := imagetest.NewRegistry(b)
	var layers []v1.Layer
	random := make([]byte, 24<<10)
	for i := range 8 {
		var files []file
		for j := range 1200 {
			_, _ = rand.Read(random[:len(random)/4])
			files = append(files, text(fmt.Sprintf("%d/%d", i, j), string(random)))
		}
		layers = append(layers, imagetest.Layer(b, files...))
	}
	ref := reg.Push(b, "bench:1", imagetest.Image(b, v1.Config{}, layers...))
	for _, unpacks := range []int{1, 2, 3, 8} {
		b.Run(fmt.Sprintf("%d at a time", unpacks), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				st, err := storage.Open(b.Context(), storage.Config{Root: b.TempDir()}, slog.New(slog.DiscardHandler))
				if err != nil {
					b.Fatal(err)
				}
				s := New(Config{MaxConcurrentDownloads: 8, MaxConcurrentUnpacks: unpacks}, st, slog.New(slog.DiscardHandler),
					noop.NewTracerProvider().Tracer(""), func(context.Context, string) []string { return nil })
				if err := s.Load(b.Context()); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				_, err = s.Pull(b.Context(), &criv1.ImageSpec{Image: ref}, nil, nil)
				b.StopTimer()
				if err != nil {
					b.Fatal(err)
				}
				s.Close()
				if err := st.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
