//go:build integration

package faults

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/testenv"
)

// onDisk has sandboxd keep everything durable in a folder.
func onDisk(root string) testenv.Setup {
	return testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) { settings.Set("root", root) })}
}

// free is how many bytes and inodes a file system has left.
func free(t *testing.T, root string) (space, inodes int64) {
	t.Helper()
	unix.Sync() // what was deleted is free once it is written
	var st unix.Statfs_t
	must(t, unix.Statfs(root, &st))
	return int64(st.Bavail) * st.Bsize, int64(st.Ffree)
}

// waitFree waits until about as much is left of a file system as before.
func waitFree(t *testing.T, root string, space, inodes int64) {
	t.Helper()
	eventually(t, patience, "the space of a failed pull comes back", func() error {
		if s, i := free(t, root); s < space-1<<20 || i < inodes-20 {
			return fmt.Errorf("%d bytes and %d inodes are free, before it were %d and %d", s, i, space, inodes)
		}
		return nil
	})
}

// watchImageFs asks for the use of the images' file system until the returned function is
// called; each answer must come and be possible.
func (s *system) watchImageFs(root string) (stop func()) {
	var st unix.Statfs_t
	must(s.t, unix.Statfs(root, &st))
	ctx, cancel := context.WithCancel(s.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			answer, err := s.Images.ImageFsInfo(ctx, &criv1.ImageFsInfoRequest{})
			if err != nil {
				if ctx.Err() == nil {
					s.t.Errorf("use of the images' file system: %v", err)
				}
				return
			}
			for _, f := range append(answer.GetImageFilesystems(), answer.GetContainerFilesystems()...) {
				if used := f.GetUsedBytes().GetValue(); used > st.Blocks*uint64(st.Bsize) || f.GetInodesUsed().GetValue() > st.Files || f.GetTimestamp() == 0 {
					s.t.Errorf("use of the images' file system: %v of %d bytes and %d inodes", f, st.Blocks*uint64(st.Bsize), st.Files)
				}
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// A pull that fills the disk, with bytes or with files, in the download or in the extraction,
// says so; what it took comes back by itself, and a smaller image can be pulled and run.
func TestPullsThatFillTheDisk(t *testing.T) {
	root := smallDisk(t, 64, "-N", "4000")
	s, reg := withBadRegistry(t, onDisk(root))
	defer s.watchImageFs(root)()
	var files []item
	for n := range 5000 {
		files = append(files, item{name: fmt.Sprintf("many/%d", n), body: "x"})
	}
	refs := map[string]string{
		"download":   reg.add("download:1", onBusybox(t, noise(t, "noise", 70<<20))),
		"extraction": reg.add("extraction:1", onBusybox(t, layer(t, item{name: "zeros", body: strings.Repeat("0", 70<<20)}))),
		"inodes":     reg.add("inodes:1", onBusybox(t, layer(t, files...))),
	}
	small := reg.add("small:1", onBusybox(t, layer(t, item{name: "small", body: "x"})))
	// Once, so that what stays for good is there.
	must(t, errors.Join(second(s.tryPull(small, nil))))
	s.removeImage(small)
	space, inodes := free(t, root)
	for round := range scaled(t, 2) {
		for _, name := range slices.Sorted(maps.Keys(refs)) {
			_, err := s.tryPull(refs[name], nil)
			if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "no space") {
				t.Errorf("round %d, %s: %v", round, name, err)
			}
			if s.present(refs[name]) {
				t.Errorf("round %d, %s: the image is shown", round, name)
			}
			waitFree(t, root, space, inodes)
		}
		if _, err := s.tryPull(small, nil); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if code := s.runs(small, "small", "test -s /small"); code != 0 {
			t.Errorf("round %d: exit code %d", round, code)
		}
		s.removeImage(small)
		waitFree(t, root, space, inodes)
	}
}

func second(_ string, err error) error { return err }

// find gives the path of something of that name below a folder; empty if there is nothing.
func find(t *testing.T, root, name string) (found string) {
	t.Helper()
	must(t, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && e.Name() == name {
			found = path
			return fs.SkipAll
		}
		return err
	}))
	return found
}

// waitGone waits until there is nothing of that name below a folder.
func waitGone(t *testing.T, root, name string) {
	t.Helper()
	eventually(t, patience, name+" is freed", func() error {
		if path := find(t, root, name); path != "" {
			return fmt.Errorf("there is %s", path)
		}
		return nil
	})
}

// One layer that cannot be deleted keeps no other from being freed, does not keep sandboxd
// from starting, and is freed itself once it can be.
func TestUndeletableLayersStopNobody(t *testing.T) {
	root := smallDisk(t, 128)
	s, reg := withBadRegistry(t, onDisk(root))
	refs := map[string]string{}
	for _, name := range []string{"mounted", "immutable", "plain", "later"} {
		refs[name] = reg.add(name+":1", onBusybox(t, layer(t, item{name: "layer/folder-" + name + "/file-" + name, body: name}), noise(t, "noise-"+name, 1<<20)))
		must(t, second(s.tryPull(refs[name], nil)))
	}
	inside := find(t, root, "folder-mounted")
	must(t, unix.Mount("tmpfs", inside, "tmpfs", 0, "size=1m"))
	defer func() { _ = unix.Unmount(inside, unix.MNT_DETACH) }()
	command(t, "chattr", "+i", find(t, root, "file-immutable"))

	for _, name := range []string{"mounted", "immutable", "plain"} {
		s.removeImage(refs[name])
		if s.present(refs[name]) {
			t.Errorf("%s is shown", name)
		}
	}
	waitGone(t, root, "file-plain")
	waitGone(t, root, "noise-mounted")
	must(t, s.Restart(t.Context(), testenv.Sandboxd))
	s.removeImage(refs["later"])
	waitGone(t, root, "file-later")
	inside = find(t, root, "folder-mounted")
	stuck := find(t, root, "file-immutable")
	if inside == "" || stuck == "" {
		t.Fatal("what cannot be deleted has gone")
	}
	// What could not be deleted stands in the way of nothing.
	for name := range refs {
		must(t, second(s.tryPull(refs[name], nil)))
		if code := s.runs(refs[name], "again", fmt.Sprintf("test %[1]s = $(cat /layer/folder-%[1]s/file-%[1]s)", name)); code != 0 {
			t.Errorf("%s once more: exit code %d", name, code)
		}
	}

	must(t, unix.Unmount(inside, 0))
	command(t, "chattr", "-i", stuck)
	for name := range refs {
		s.removeImage(refs[name]) // any removal takes along what could not be removed before
	}
	for name := range refs {
		waitGone(t, root, "folder-"+name)
	}
}

// withNative adds a handler whose containers have another snapshotter.
func withNative() testenv.Setup {
	return testenv.Setup{Configure: onSandboxd(func(settings testenv.Settings) { handler(settings, "native", map[string]any{"snapshotter": "native"}) })}
}

// shells are pods, one of each handler, in which containers are run one after the other.
type shells map[string]struct {
	id     string
	config *criv1.PodSandboxConfig
}

func (s *system) shells(handlers ...string) shells {
	s.t.Helper()
	all := shells{}
	for _, handler := range handlers {
		pod := all[handler]
		pod.config = s.podConfig("shell" + handler)
		pod.id = s.pod(pod.config, handler)
		all[handler] = pod
	}
	return all
}

// run runs a script in a container of an image in a handler's pod, and gives what it wrote.
func (s *system) run(in shells, handler, image, text string) string {
	s.t.Helper()
	pod := in[handler]
	c := script("main", text)
	c.Image.Image = image
	id := s.container(pod.id, pod.config, c)
	if st := s.waitExit(id, patience); st.GetExitCode() != 0 {
		s.t.Errorf("exit code %d of %q", st.GetExitCode(), text)
	}
	path := s.status(id).GetLogPath()
	out := joined(records(s.t, path), "stdout")
	must(s.t, s.removeContainer(id))
	must(s.t, os.Remove(path))
	return out
}

func folder(name string) item   { return item{name: name + "/", kind: tar.TypeDir} }
func link(name, to string) item { return item{name: name, link: to, kind: tar.TypeSymlink} }
func hide(name string) item {
	return item{name: filepath.Join(filepath.Dir(name), ".wh."+filepath.Base(name))}
}
func opaque(name string) item { return item{name: name + "/.wh..wh..opq"} }

// Containers see the tree that the image specification says, wherever in a layer a whiteout
// stands, with each snapshotter; a whiteout without a name fails the pull.
func TestWhiteoutsInUnusualOrder(t *testing.T) {
	file := func(name, body string) item { return item{name: name, body: body} }
	lower, upper, want := []item{folder("t")}, []item{}, []string{}
	for name, c := range map[string]struct {
		upper []item
		want  []string
	}{
		"opaque-last":     {[]item{file("d/new", "2"), opaque("d")}, []string{"d", "d/new", "f", "l"}},
		"opaque-first":    {[]item{opaque("d"), file("d/new", "2")}, []string{"d", "d/new", "f", "l"}},
		"opaque-for-file": {[]item{opaque("f"), file("f/new", "2")}, []string{"d", "d/a", "d/b", "f", "f/new", "l"}},
		"file-after":      {[]item{file("f", "2"), hide("f")}, []string{"d", "d/a", "d/b", "f", "l"}},
		"file-before":     {[]item{hide("f"), file("f", "2")}, []string{"d", "d/a", "d/b", "f", "l"}},
		"link-after":      {[]item{link("f", "d/a"), hide("f")}, []string{"d", "d/a", "d/b", "f", "l"}},
		"link-hidden":     {[]item{hide("l")}, []string{"d", "d/a", "d/b", "f"}},
		"folder-hidden":   {[]item{hide("d")}, []string{"f", "l"}},
		"folder-replaced": {[]item{file("d/new", "2"), hide("d")}, []string{"d", "d/new", "f", "l"}},
		"nothing-hidden":  {[]item{hide("none"), hide("d/none")}, []string{"d", "d/a", "d/b", "f", "l"}},
		"many-hidden":     {[]item{hide("d"), hide("f"), hide("l"), hide("many")}, nil},
	} {
		at := func(i item) item {
			i.name = "t/" + name + "/" + i.name
			return i
		}
		lower = append(lower, at(folder(".")), at(folder("d")), at(file("d/a", "1")), at(file("d/b", "1")), at(file("f", "1")), at(link("l", "d")))
		if name == "many-hidden" {
			for n := range 10_000 {
				lower = append(lower, at(file(fmt.Sprintf("many/%d", n), "")))
			}
		}
		want = append(want, "/t/"+name)
		for _, i := range c.upper {
			upper = append(upper, at(i))
		}
		for _, path := range c.want {
			want = append(want, "/t/"+name+"/"+path)
		}
	}
	slices.Sort(want)
	s, reg := withBadRegistry(t, withNative())
	ref := reg.add("whiteouts:1", onBusybox(t, layer(t, lower...), layer(t, upper...)))
	must(t, second(s.tryPull(ref, nil)))
	in := s.shells("", "native")
	for handler := range in {
		got := strings.Fields(s.run(in, handler, ref, "find /t/*"))
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("handler %q: %d paths differ from %d:\n%s\nwant\n%s", handler, len(got), len(want), strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if got := s.run(in, handler, ref, "cat /t/file-after/f /t/file-before/f /t/link-after/f"); got != "221" {
			t.Errorf("handler %q: contents %q", handler, got)
		}
	}
	for i, name := range []string{".wh.", ".wh..", ".wh...", "t/.wh.", "t/.wh.."} {
		bad := reg.add(fmt.Sprintf("malformed:%d", i), onBusybox(t, layer(t, item{name: name})))
		if _, err := s.tryPull(bad, nil); status.Code(err) != codes.DataLoss || s.present(bad) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if got := s.run(in, "", ref, "cat /t/opaque-last/d/new"); got != "2" {
		t.Errorf("after malformed whiteouts another image has %q", got)
	}
}

// Whatever an image has for names and links, nothing on the node changes by pulling or running
// it, and nothing of the node shows in it.
func TestLayersDoNotEscape(t *testing.T) {
	s, reg := withBadRegistry(t, withNative())
	outside := t.TempDir()
	mark := filepath.Join(outside, "mark")
	must(t, os.WriteFile(mark, []byte("of the node"), 0o640))
	before, err := os.Lstat(mark)
	must(t, err)
	in := s.shells("", "native")
	up := strings.Repeat("../", 20) + strings.TrimPrefix(outside, "/")
	evil := func(name string) item { return item{name: name, body: "evil"} }
	for name, layers := range map[string][][]item{
		"names":     {{evil("../../x"), evil(up + "/mark"), evil("/" + up + "/new"), evil(mark)}},
		"link":      {{link("d", outside), evil("d/mark"), evil("d/new")}},
		"next":      {{link("d", outside)}, {evil("d/mark"), hide("d/mark")}, {folder("d"), evil("d/new")}},
		"relative":  {{link("d", up), evil("d/new"), hide("d/mark"), opaque("d")}},
		"hard-up":   {{item{name: "h", link: up + "/mark", kind: tar.TypeLink}, evil("h")}},
		"hard-link": {{link("l", mark), item{name: "h", link: "l", kind: tar.TypeLink}, item{name: "h", body: "evil", mode: 0o777}}},
		"hard-far":  {{link("d", outside), item{name: "h", link: "d/mark", kind: tar.TypeLink}}},
		"mode":      {{link("l", mark)}, {item{name: "l", link: mark, kind: tar.TypeSymlink, mode: 0o777}}},
		"loop":      {{link("a", "b"), link("b", "a"), evil("a/x")}},
		"long":      {{evil(strings.Repeat("n", 5000))}},
		"odd":       {{evil("a\nb"), evil("\xff\xfe"), evil("."), folder(".")}},
		"deep":      {{folder(strings.Repeat("d/", 3000) + "d")}},
		"etc":       {{link("etc", outside), evil("etc/passwd"), evil("etc/new")}},
		"etc-files": {{link("etc/hosts", mark), link("etc/resolv.conf", mark), link("etc/hostname", mark), link("etc/mtab", mark)}},
		"setuid":    {{item{name: "s", body: "x", mode: 0o4755}, item{name: "g/", kind: tar.TypeDir, mode: 0o2775}}},
	} {
		made := make([]v1.Layer, 0, len(layers))
		for _, l := range layers {
			made = append(made, layer(t, l...))
		}
		ref := reg.add("evil:"+name, onBusybox(t, made...))
		_, err := s.tryPull(ref, nil)
		if err != nil && status.Code(err) != codes.DataLoss {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			for handler := range in {
				got := s.run(in, handler, ref, "find / -xdev -type f -size -2 -path '*ark*' -exec cat {} + ; cat /h /d/mark /l /etc/mtab 2>/dev/null; stat -c %a /s /g 2>/dev/null; true")
				if strings.Contains(got, "of the node") {
					t.Errorf("%s: a file of the node shows", name)
				}
				if name == "setuid" && got != "4755\n2775\n" {
					t.Errorf("modes are %q", got)
				}
			}
			s.removeImage(ref)
		}
		entries, err := os.ReadDir(outside)
		must(t, err)
		text, err := os.ReadFile(mark)
		must(t, err)
		after, err := os.Lstat(mark)
		must(t, err)
		if len(entries) != 1 || string(text) != "of the node" || after.Mode() != before.Mode() || !after.ModTime().Equal(before.ModTime()) {
			t.Fatalf("%s has changed the node: %v, %q, %s", name, entries, text, after.Mode())
		}
	}
}

// What an image may have besides files and links harms nobody: it is refused as the image's
// fault, or is there and can do nothing. Many layers are no trouble.
func TestOddEntriesOfLayers(t *testing.T) {
	s, reg := withBadRegistry(t, withNative())
	in := s.shells("", "native")
	headers := func(all ...*tar.Header) []v1.Layer {
		var packed bytes.Buffer
		w := tar.NewWriter(&packed)
		for _, h := range all {
			h.Format = tar.FormatPAX
			must(t, w.WriteHeader(h))
		}
		must(t, w.Close())
		return []v1.Layer{tarLayer(t, packed.Bytes())}
	}
	var many []v1.Layer
	for n := range 130 {
		many = append(many, layer(t, item{name: fmt.Sprintf("many/%d", n), body: "x"}))
	}
	deep := []v1.Layer{
		layer(t, item{name: "t/", kind: tar.TypeDir, mode: 0o1777}), layer(t, item{name: "t/x", body: "1"}),
		layer(t, link("l", "t"), item{name: "l/y", body: "1"}),
	}
	for name, tt := range map[string]struct {
		layers     []v1.Layer
		text, want string // what is run and what it prints; nothing if the image is refused
	}{
		"owner too large":    {headers(&tar.Header{Name: "u", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 1 << 32}), "", ""},
		"group negative":     {headers(&tar.Header{Name: "u", Typeflag: tar.TypeReg, Gid: -1}), "", ""},
		"largest owner":      {headers(&tar.Header{Name: "u", Typeflag: tar.TypeReg, Uid: 1<<32 - 2}), "stat -c %u /u", "4294967294\n"},
		"hard link to a dir": {[]v1.Layer{layer(t, folder("d"), item{name: "h", link: "d", kind: tar.TypeLink})}, "", ""},
		"hard link to none":  {[]v1.Layer{layer(t, item{name: "h", link: "none", kind: tar.TypeLink})}, "", ""},
		"unknown kind":       {[]v1.Layer{layer(t, item{name: "z", kind: 'Z'})}, "", ""},
		"devices": {
			headers(&tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Devmajor: 8, Mode: 0o666},
				&tar.Header{Name: "kmsg", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 11, Mode: 0o666}),
			"cat /disk || cat /kmsg || echo refused", "refused\n",
		},
		"attributes": {headers(&tar.Header{Name: "x", Typeflag: tar.TypeReg, Mode: 0o644, PAXRecords: map[string]string{
			"SCHILY.xattr.trusted.evil": "1", "SCHILY.xattr.nonsense": "1", "SCHILY.xattr.trusted.overlay.redirect": "/etc", "SCHILY.xattr.user.good": "1",
		}}), "test ! -s /x && echo there", "there\n"},
		"many layers":         {many, "ls /many | wc -l", "130\n"},
		"modes through links": {deep, "stat -c %a /t; ls /t", "1777\nx\ny\n"},
	} {
		ref := reg.add("odd:"+strings.ReplaceAll(name, " ", "-"), onBusybox(t, tt.layers...))
		_, err := s.tryPull(ref, nil)
		if tt.want == "" {
			if status.Code(err) != codes.DataLoss || s.present(ref) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		must(t, err)
		for handler := range in {
			if name == "many layers" && handler == "native" {
				continue // would copy all for each layer
			}
			if got := s.run(in, handler, ref, tt.text+" 2>/dev/null"); got != tt.want {
				t.Errorf("%s, handler %q: %q, want %q", name, handler, got, tt.want)
			}
		}
	}
}
