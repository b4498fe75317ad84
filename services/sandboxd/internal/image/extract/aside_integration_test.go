//go:build integration

package extract

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/internal/testkit"
)

// plain reads layers as they are.
type plain struct{}

func (plain) Tar(_ context.Context, _ ocispec.Descriptor, r io.Reader) (io.ReadCloser, error) {
	return io.NopCloser(r), nil
}

// bench is where layers are extracted.
type bench struct {
	t     *testing.T
	store content.Store
	sn    snapshots.Snapshotter
	a     Applier
	run   int // makes names of snapshots
}

func newBench(t *testing.T) *bench {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir() // in memory: hundreds of layers are committed
	if err := (&mount.Mount{Type: "tmpfs", Source: "tmpfs"}).Mount(dir); err != nil {
		testkit.Lacks(t, "tmpfs: "+err.Error())
	}
	t.Cleanup(func() { _ = mount.UnmountAll(dir, unix.MNT_DETACH) })
	store, err := local.NewStore(filepath.Join(dir, "content"))
	if err != nil {
		t.Fatal(err)
	}
	sn, err := overlay.NewSnapshotter(filepath.Join(dir, "overlay"), overlay.WithUpperdirLabel)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sn.Close() })
	return &bench{t: t, store: store, sn: sn, a: New(store, plain{}, Target{})}
}

// lower tells where the layers of the overlay snapshotter are.
func (b *bench) lower() Lower {
	return Lower{Folders: func(ctx context.Context, layer string) ([]string, func(), error) {
		dirs, err := Folders(ctx, b.sn, layer)
		return dirs, func() {}, err
	}}
}

// put stores a layer.
func (b *bench) put(headers ...*tar.Header) ocispec.Descriptor {
	b.t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range headers {
		h.ModTime, h.Size = time.Unix(1_700_000_000, 0), 0
		body := h.Gname // the text of a file, for short
		h.Gname, h.Format = "", tar.FormatPAX
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(body))
		}
		if err := w.WriteHeader(h); err != nil {
			b.t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			_, _ = io.WriteString(w, body)
		}
	}
	if err := w.Close(); err != nil {
		b.t.Fatal(err)
	}
	desc := ocispec.Descriptor{Digest: digest.FromBytes(buf.Bytes()), Size: int64(buf.Len())}
	if _, err := b.store.Info(b.t.Context(), desc.Digest); err == nil {
		return desc
	}
	if err := content.WriteBlob(b.t.Context(), b.store, desc.Digest.String(), &buf, desc); err != nil {
		b.t.Fatal(err)
	}
	return desc
}

// inOrder extracts layers one on top of the other and returns the name of the topmost.
func (b *bench) inOrder(layers []ocispec.Descriptor) (string, error) {
	b.run++
	parent := ""
	for i, l := range layers {
		name := fmt.Sprintf("%d-%d", b.run, i)
		mounts, err := b.sn.Prepare(b.t.Context(), name+"-", parent)
		if err != nil {
			b.t.Fatal(err)
		}
		if _, err := b.a.Apply(b.t.Context(), l, mounts); err != nil {
			return "", err
		}
		if err := b.sn.Commit(b.t.Context(), name, name+"-"); err != nil {
			b.t.Fatal(err)
		}
		parent = name
	}
	return parent, nil
}

// aside extracts layers in any order, and puts them together in theirs.
func (b *bench) aside(layers []ocispec.Descriptor, rnd *rand.Rand) (string, error) {
	ctx := b.t.Context()
	b.run++
	var done []digest.Digest
	aside := NewAside(b.sn, b.a, b.lower(), func(d digest.Digest) { done = append(done, d) })
	for _, i := range rnd.Perm(len(layers)) {
		mounts, err := aside.Prepare(ctx, fmt.Sprintf("%d-%d-", b.run, i), "")
		if err != nil {
			b.t.Fatal(err)
		}
		if i > 0 { // as the unpacker does
			mounts = []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"rw", "upperdir=" + mounts[0].Source}}}
		}
		got, err := aside.Apply(ctx, layers[i], mounts)
		if err != nil {
			return "", err
		}
		if got.Digest != layers[i].Digest || got.Size != layers[i].Size {
			b.t.Errorf("layer %d: content %s of %d bytes", i, got.Digest, got.Size)
		}
	}
	parent := ""
	for i := range layers {
		name := fmt.Sprintf("%d-%d", b.run, i)
		if err := aside.Commit(ctx, name, name+"-", snapshots.WithParent(parent)); err != nil {
			return "", err
		}
		parent = name
	}
	want := make([]digest.Digest, 0, len(layers))
	for _, l := range layers {
		want = append(want, l.Digest)
	}
	if diff := cmp.Diff(want, done); diff != "" {
		b.t.Errorf("layers told of (-want +got):\n%s", diff)
	}
	return parent, nil
}

// whole extracts layers one after the other into one folder.
func (b *bench) whole(layers []ocispec.Descriptor) (string, error) {
	root := b.t.TempDir()
	for _, l := range layers {
		if _, err := b.a.Apply(b.t.Context(), l, []mount.Mount{{Type: "bind", Source: root, Options: []string{"rw", "rbind"}}}); err != nil {
			return "", err
		}
	}
	return root, nil
}

// shown describes what a container would see of layers.
func (b *bench) shown(layer string) []string {
	b.t.Helper()
	mounts, err := b.sn.View(b.t.Context(), "view-"+layer, layer)
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	err = mount.WithReadonlyTempMount(b.t.Context(), mounts, func(root string) error {
		out = describe(b.t, root, false)
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// describe lists a folder: kinds, modes, owners, attributes, contents, and which names are one file.
func describe(t *testing.T, root string, notes bool) []string {
	t.Helper()
	var out []string
	inodes := map[uint64]string{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		st := fi.Sys().(*syscall.Stat_t)
		name := strings.TrimPrefix(path, root+"/")
		line := fmt.Sprintf("%s %v %d:%d %d", name, fi.Mode(), st.Uid, st.Gid, st.Rdev)
		switch {
		case fi.Mode().IsRegular():
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %q %d", data, fi.ModTime().Unix())
		case fi.Mode()&fs.ModeSymlink != 0:
			to, _ := os.Readlink(path)
			line += " -> " + to
		}
		if first, ok := inodes[st.Ino]; ok && !fi.IsDir() {
			line += " = " + first
		} else {
			inodes[st.Ino] = name
		}
		for _, attr := range []string{"user.a", notesTrusted + noteOpaque} {
			var value [64]byte
			if n, err := unix.Lgetxattr(path, attr, value[:]); err == nil && (notes || attr != notesTrusted+noteOpaque) {
				line += " " + attr + "=" + hex.EncodeToString(value[:n])
			}
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

// someLayer makes entries that meet each other and those of other layers often.
func someLayer(rnd *rand.Rand) (out []*tar.Header) {
	names := []string{"a", "b", "c"}
	path := func() string {
		parts := make([]string, 1+rnd.IntN(3))
		for i := range parts {
			parts[i] = names[rnd.IntN(len(names))]
		}
		return strings.Join(parts, "/")
	}
	for range 1 + rnd.IntN(5) {
		p := path()
		h := &tar.Header{Name: p, Mode: 0o700 | rnd.Int64N(0o100), Uid: rnd.IntN(3), Gid: rnd.IntN(3), Typeflag: tar.TypeReg}
		switch kind := rnd.IntN(10); kind {
		case 0, 1:
			h.Name, h.Typeflag = p+"/", tar.TypeDir
			h.PAXRecords = map[string]string{"SCHILY.xattr.user.a": p}
		case 2, 3, 4:
			dir, base := filepath.Split(p)
			h.Name = dir + ".wh." + base
		case 5:
			h.Name = p + "/.wh..wh..opq"
		case 6:
			h.Name = ".wh..wh..opq"
			if rnd.IntN(3) > 0 {
				h.Name = p
			}
		default:
			h.Gname = fmt.Sprint("text ", rnd.IntN(1000))
		}
		out = append(out, h)
	}
	return out
}

// Layers that are extracted without those below them are the same, byte for byte of their folders,
// as those that are extracted in order, and show what extraction into one folder shows.
func TestAnyOrderIsTheSame(t *testing.T) {
	b := newBench(t)
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		var layers []ocispec.Descriptor
		var made [][]*tar.Header
		for range 2 + rnd.IntN(4) {
			made = append(made, someLayer(rnd))
			layers = append(layers, b.put(made[len(made)-1]...))
		}
		ordered, orderErr := b.inOrder(layers)
		aside, asideErr := b.aside(layers, rnd)
		top := aside
		root, wholeErr := b.whole(layers)
		if refused := wholeErr != nil; (orderErr != nil) != refused || (asideErr != nil) != refused {
			show(t, made)
			t.Fatalf("seed %d, in order: %v\naside: %v\nwhole: %v", seed, orderErr, asideErr, wholeErr)
		}
		if wholeErr != nil {
			continue
		}
		for {
			one, two := b.info(ordered), b.info(aside)
			if diff := cmp.Diff(describe(t, one.Labels[FolderLabel], true), describe(t, two.Labels[FolderLabel], true)); diff != "" {
				t.Errorf("seed %d, folder of %s (-ordered +aside):\n%s", seed, aside, diff)
			}
			if ordered, aside = one.Parent, two.Parent; ordered == "" {
				break
			}
		}
		want, got := describe(t, root, false), b.shown(top)
		if named(made, ".wh.") {
			// A folder that a layer implies and hides below it is a new one only if it is hidden first in
			// the whole, and is there only then if all that it has is whiteouts.
			bare := named(made, ".wh..wh..opq")
			want, got = onlyFiles(want, bare), onlyFiles(got, bare)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			show(t, made)
			t.Fatalf("seed %d (-whole +layers):\n%s", seed, diff)
		}
	}
}

func named(layers [][]*tar.Header, part string) bool {
	return slices.ContainsFunc(layers, func(l []*tar.Header) bool {
		return slices.ContainsFunc(l, func(h *tar.Header) bool { return strings.Contains(h.Name, part) })
	})
}

// onlyFiles leaves of folders their names at most.
func onlyFiles(described []string, nothing bool) (out []string) {
	for _, line := range described {
		if name, attributes, _ := strings.Cut(line, " "); strings.HasPrefix(attributes, "d") {
			if line = name + "/"; nothing {
				continue
			}
		}
		out = append(out, line)
	}
	return out
}

func show(t *testing.T, layers [][]*tar.Header) {
	t.Helper()
	for i, l := range layers {
		for _, h := range l {
			t.Logf("layer %d: %c %s %o %d:%d", i, h.Typeflag, h.Name, h.Mode, h.Uid, h.Gid)
		}
	}
}

func (b *bench) info(layer string) snapshots.Info {
	b.t.Helper()
	info, err := b.sn.Stat(b.t.Context(), layer)
	if err != nil {
		b.t.Fatal(err)
	}
	return info
}

// A hard link may lead to a file of a layer below.
func TestHardLinksToLayersBelow(t *testing.T) {
	reg := func(name, text string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o4751, Uid: 3, Gid: 4, Gname: text, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "x"}}
	}
	dir := func(name string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o750, Uid: 5}
	}
	link := func(name, to string) *tar.Header { // a hard link says the attributes of its file again
		return &tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to, Mode: 0o4751, Uid: 3, Gid: 4}
	}
	sym := func(name, to string) *tar.Header {
		return &tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}
	}
	tests := map[string]struct {
		layers  [][]*tar.Header
		refused bool
	}{
		"file":             {[][]*tar.Header{{reg("f", "1")}, {reg("g", "2"), link("h", "f")}}, false},
		"two layers below": {[][]*tar.Header{{dir("d"), reg("d/f", "1")}, {reg("g", "2")}, {link("h", "d/f"), link("i", "h"), reg("j", "3")}}, false},
		"absolute":         {[][]*tar.Header{{dir("d"), reg("d/f", "1")}, {link("d/e/h", "/d/f")}}, false},
		"symbolic link":    {[][]*tar.Header{{sym("s", "nowhere")}, {{Name: "h", Typeflag: tar.TypeLink, Linkname: "s", Mode: 0o777}}}, false},
		"the topmost":      {[][]*tar.Header{{reg("f", "1")}, {reg("f", "2")}, {link("h", "f")}}, false},
		"then hidden":      {[][]*tar.Header{{reg("f", "1")}, {link("h", "f"), reg(".wh.f", "")}}, false},
		"hidden":           {[][]*tar.Header{{reg("f", "1")}, {reg(".wh.f", ""), link("h", "f")}}, true},
		"hidden before":    {[][]*tar.Header{{reg("f", "1")}, {reg(".wh.f", "")}, {link("h", "f")}}, true},
		"folder hidden":    {[][]*tar.Header{{dir("d"), reg("d/f", "1")}, {reg("d/.wh..wh..opq", ""), link("h", "d/f")}}, true},
		"nothing":          {[][]*tar.Header{{reg("f", "1")}, {link("h", "g")}}, true},
		"a folder":         {[][]*tar.Header{{dir("d")}, {link("h", "d")}}, true},
	}
	for name, c := range tests {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			var layers []ocispec.Descriptor
			for _, l := range c.layers {
				layers = append(layers, b.put(l...))
			}
			_, orderErr := b.inOrder(layers)
			aside, asideErr := b.aside(layers, rand.New(rand.NewPCG(1, 1)))
			root, wholeErr := b.whole(layers)
			if refused := wholeErr != nil; (orderErr != nil) != refused || (asideErr != nil) != refused || refused != c.refused {
				t.Fatalf("in order: %v\naside: %v\nwhole: %v", orderErr, asideErr, wholeErr)
			}
			if c.refused {
				return
			}
			if diff := cmp.Diff(describe(t, root, false), b.shown(aside)); diff != "" {
				t.Errorf("(-whole +layers):\n%s", diff)
			}
		})
	}
}

var _ diff.Applier = (*Aside)(nil)
