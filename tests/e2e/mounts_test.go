//go:build integration

package e2e

import (
	"archive/tar"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/tests/fixture"
	"github.com/crisp-cri/crisp/tests/testenv"
)

// listing is what is in a folder of the node, with everything below.
func listing(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		out = append(out, strings.TrimPrefix(path, dir))
		return err
	}))
	return out
}

// sources makes one of each kind of thing that can be mounted.
func sources(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.Mkdir(at("dir"), 0o755))
	must(t, os.WriteFile(at("dir/file"), []byte("content"), 0o644))
	must(t, os.WriteFile(at("file"), []byte("content"), 0o644))
	must(t, os.MkdirAll(at("odd name\nof a folder"), 0o755))
	must(t, os.WriteFile(at("odd name\nof a folder/file"), []byte("content"), 0o644))
	for name, to := range map[string]string{
		"to-dir": "dir", "to-file": "file", "three": "two", "two": "one", "one": at("dir"), "dangling": "none", "loop": "loop",
	} {
		must(t, os.Symlink(to, at(name)))
	}
	must(t, syscall.Mkfifo(at("fifo"), 0o600))
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: at("socket"), Net: "unix"})
	must(t, err)
	t.Cleanup(func() { _ = socket.Close() })
	return dir
}

// A mount's source may be of any kind and a link to it; a missing one becomes a folder, as
// kubelet relies on. What fails leaves nothing on the node, and the name is free again.
func TestMountSources(t *testing.T) {
	s := startWith(t, testenv.Setup{})
	pod, config := s.pod("sources")
	dir := sources(t)
	at := func(name string) string { return filepath.Join(dir, name) }

	good := map[string]struct{ source, target, check string }{
		"folder":              {at("dir"), "/v", "cat /v/file"},
		"file":                {at("file"), "/v", "cat /v"},
		"link to folder":      {at("to-dir"), "/v", "cat /v/file"},
		"link to file":        {at("to-file"), "/v", "cat /v"},
		"three links":         {at("three"), "/v", "cat /v/file"},
		"dots":                {at("dir/../file"), "/v", "cat /v"},
		"odd name":            {at("odd name\nof a folder"), "/v", "cat /v/file"},
		"fifo":                {at("fifo"), "/v", "test -p /v && printf content"},
		"socket":              {at("socket"), "/v", "test -S /v && printf content"},
		"root of the node":    {"/", "/v", "cat /v" + at("file")},
		"file over a file":    {at("file"), "/etc/passwd", "cat /etc/passwd"},
		"folder over folder":  {at("dir"), "/usr", "cat /usr/file"},
		"deep missing target": {at("file"), "/a/b/c/d", "cat /a/b/c/d"},
	}
	for name, c := range good {
		cfg := containerConfig("good", c.check)
		cfg.Mounts = []*criv1.Mount{{ContainerPath: c.target, HostPath: c.source, Readonly: true}}
		id := s.container(pod, config, cfg)
		if st := s.waitExit(id); st.GetExitCode() != 0 {
			t.Errorf("%s: exit code %d, %s", name, st.GetExitCode(), st.GetMessage())
		}
		contains(t, s.crictl("logs", id), "content")
		s.remove(id)
	}

	before := listing(t, dir)
	for name, c := range map[string]struct {
		source, target string
		code           codes.Code
	}{
		"dangling link": {at("dangling"), "/v", codes.InvalidArgument},
		"loop":          {at("loop"), "/v", codes.FailedPrecondition},
		"relative":      {"dir", "/v", codes.InvalidArgument},
		"empty":         {"", "/v", codes.InvalidArgument},
		"below a file":  {at("file/x"), "/v", codes.FailedPrecondition},
		"onto the root": {at("dir"), "/", codes.InvalidArgument},
		"target dots":   {at("dir"), "/x/..", codes.InvalidArgument},
		"no target":     {at("dir"), "", codes.InvalidArgument},
		"target rel":    {at("dir"), "v", codes.InvalidArgument},
	} {
		cfg := containerConfig("bad", "true")
		// The missing folder is made for a container that then fails.
		cfg.Mounts = []*criv1.Mount{{ContainerPath: "/m", HostPath: at("missing/deep")}, {ContainerPath: c.target, HostPath: c.source}}
		if _, err := s.create(pod, config, cfg); status.Code(err) != c.code {
			t.Errorf("%s: %v, want %s", name, err, c.code)
		}
		if after := listing(t, dir); !slices.Equal(before, after) {
			t.Errorf("%s: the node has %v, had %v", name, after, before)
		}
	}
	cfg := containerConfig("bad", "test -d /m")
	cfg.Mounts = []*criv1.Mount{{ContainerPath: "/m", HostPath: at("missing/deep")}}
	if code := s.waitExit(s.container(pod, config, cfg)).GetExitCode(); code != 0 {
		t.Errorf("missing source: exit code %d", code)
	}
}

// A start that cannot mount fails with a reason, and leaves nothing of it in the image or on
// the node.
func TestMountTargetsOfAnotherKind(t *testing.T) {
	s := startWith(t, testenv.Setup{})
	pod, config := s.pod("kinds")
	dir := sources(t)
	before := listing(t, dir)
	for name, m := range map[string]*criv1.Mount{
		"file over a folder": {ContainerPath: "/etc", HostPath: filepath.Join(dir, "file")},
		"folder over a file": {ContainerPath: "/etc/passwd", HostPath: filepath.Join(dir, "dir")},
		"inside of proc":     {ContainerPath: "/proc/self/attr", HostPath: filepath.Join(dir, "dir")},
	} {
		cfg := containerConfig("kinds", "true")
		cfg.Mounts = []*criv1.Mount{m}
		id, err := s.create(pod, config, cfg)
		if err != nil {
			continue // refused before
		}
		if err := s.start(id); err == nil || !strings.Contains(err.Error(), m.GetContainerPath()) {
			t.Errorf("%s: %v", name, err)
		}
		if st := s.status(id); st.GetReason() != "StartError" || st.GetMessage() == "" {
			t.Errorf("%s: reason %q, message %q", name, st.GetReason(), st.GetMessage())
		}
		s.remove(id)
	}
	if after := listing(t, dir); !slices.Equal(before, after) {
		t.Errorf("the node has %v, had %v", after, before)
	}
}

const linkImage = "registry.k8s.io/crisp-tests/links:1"

// Links of the image at a mount's target are followed inside of the root. The request's own
// mounts win over those of the runtime, and parents come before children.
func TestMountTargets(t *testing.T) {
	outside := t.TempDir()
	layer := layerOf(t, entry{name: "up", kind: tar.TypeSymlink, link: strings.Repeat("../", 20) + outside[1:]},
		entry{name: "abs", kind: tar.TypeSymlink, link: outside})
	s := startWith(t, testenv.Setup{}, derived(t, linkImage, nil, layer))
	pod, config := s.pod("targets")
	dir := sources(t)
	inner := t.TempDir()
	must(t, os.WriteFile(filepath.Join(inner, "inner"), nil, 0o644))
	cfg := containerConfig("main", "sleep 1000")
	cfg.Image.Image = linkImage
	cfg.Mounts = []*criv1.Mount{
		{ContainerPath: "/parent/child", HostPath: inner},
		{ContainerPath: "/parent", HostPath: filepath.Join(dir, "dir")},
		{ContainerPath: "/up/new", HostPath: inner},
		{ContainerPath: "/abs", HostPath: inner},
		{ContainerPath: "/etc/hosts", HostPath: filepath.Join(dir, "file")},
		{ContainerPath: "/dev/shm", HostPath: inner},
		{ContainerPath: "/sys", HostPath: inner},
	}
	must(t, os.Mkdir(filepath.Join(dir, "dir", "child"), 0o755))
	id := s.container(pod, config, cfg)
	s.exec(id, "sh", "-ec", "test -e /parent/file; test -e /parent/child/inner; test -e /up/new/inner; test -e /abs/inner; "+
		"test $(cat /etc/hosts) = content; test -e /dev/shm/inner; test -e /sys/inner")
	if left := listing(t, outside); len(left) != 1 {
		t.Errorf("the node has %v", left)
	}
}

// Options of a mount hold in the container, alone and with read-only.
func TestMountOptions(t *testing.T) {
	s := startWith(t, testenv.Setup{})
	features, err := s.CRI.Status(t.Context(), &criv1.StatusRequest{})
	must(t, err)
	if !features.GetFeatures().GetMountOptions() {
		t.Error("mount options are not announced")
	}
	for _, h := range features.GetRuntimeHandlers() {
		if !h.GetFeatures().GetUserNamespaces() || !h.GetFeatures().GetRecursiveReadOnlyMounts() {
			t.Errorf("features of handler %q: %v", h.GetName(), h.GetFeatures())
		}
	}
	pod, config := s.pod("options")
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "run"), []byte("#!/bin/sh\n"), 0o755))
	must(t, syscall.Mknod(filepath.Join(dir, "null"), syscall.S_IFCHR|0o666, 1<<8|3))
	cfg := containerConfig("main", "sleep 1000")
	cfg.Mounts = []*criv1.Mount{
		{ContainerPath: "/plain", HostPath: dir},
		{ContainerPath: "/noexec", HostPath: dir, MountOptions: []string{"noexec"}},
		{ContainerPath: "/nodev", HostPath: dir, MountOptions: []string{"nodev", "nosuid"}, Readonly: true},
	}
	id := s.container(pod, config, cfg)
	s.exec(id, "sh", "-ec", "/plain/run; echo > /plain/null; ! /noexec/run; touch /noexec/new; ! cat /nodev/null; ! touch /nodev/new; "+
		"grep ' /nodev ' /proc/mounts | grep nosuid")
	cfg = containerConfig("bad", "true")
	cfg.Mounts = []*criv1.Mount{{ContainerPath: "/v", HostPath: dir, MountOptions: []string{"rshared"}}}
	if _, err := s.create(pod, config, cfg); status.Code(err) != codes.InvalidArgument {
		t.Errorf("an option that is none: %v", err)
	}
}

// Whatever an image has in the place of its account files and of the files that the runtime
// mounts, users are looked up in the image, and nothing of the node is touched or shown.
func TestLinksInsteadOfAccountFiles(t *testing.T) {
	outside := t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "passwd"), []byte("me:x:66:66::/:/bin/sh\n"), 0o644))
	const passwd = "root:x:0:0::/:/bin/sh\nme:x:77:88::/:/bin/sh\n"
	gone := entry{name: ".wh.etc"}
	real := []entry{{name: "real/", kind: tar.TypeDir}, {name: "real/passwd", body: passwd}, {name: "real/group", body: "us:x:88:\n"}}
	link := func(name, to string) entry { return entry{name: name, kind: tar.TypeSymlink, link: to} }
	up := strings.Repeat("../", 20) + outside[1:]
	tests := map[string]struct {
		layer  []entry
		byName codes.Code
		number codes.Code
	}{
		"etc is absolute":    {append(real, link("etc", "/real")), codes.OK, codes.OK},
		"etc is relative":    {append(real, link("etc", "../../../real")), codes.OK, codes.OK},
		"etc leads out":      {[]entry{link("etc", outside)}, codes.InvalidArgument, codes.OK},
		"etc leads up":       {[]entry{link("etc", up)}, codes.InvalidArgument, codes.OK},
		"no etc":             {[]entry{gone}, codes.InvalidArgument, codes.OK},
		"absolute passwd":    {append(real, link("etc/passwd", "/real/passwd")), codes.OK, codes.OK},
		"passwd of the node": {[]entry{link("etc/passwd", outside+"/passwd")}, codes.InvalidArgument, codes.OK},
		"dangling":           {[]entry{link("etc/passwd", "/none")}, codes.InvalidArgument, codes.OK},
		"loop":               {[]entry{link("etc/passwd", "passwd")}, codes.FailedPrecondition, codes.FailedPrecondition},
		"fifo":               {[]entry{{name: "etc/passwd", kind: tar.TypeFifo}}, codes.FailedPrecondition, codes.FailedPrecondition},
		"folder":             {[]entry{{name: ".wh.etc/passwd"}, {name: "etc/passwd/", kind: tar.TypeDir}}, codes.FailedPrecondition, codes.FailedPrecondition},
		"huge":               {[]entry{{name: "etc/passwd", body: strings.Repeat("x", 2<<20)}}, codes.FailedPrecondition, codes.FailedPrecondition},
		"long line":          {[]entry{{name: "etc/passwd", body: strings.Repeat("x", 900_000) + "\n" + passwd}}, codes.OK, codes.OK},
		"line ends of DOS":   {[]entry{{name: "etc/passwd", body: strings.ReplaceAll(passwd, "\n", "\r\n")}}, codes.OK, codes.OK},
		"negative ids":       {[]entry{{name: "etc/passwd", body: "me:x:-1:-1::/:/bin/sh\n"}}, codes.InvalidArgument, codes.OK},
		"runtime's files": {[]entry{
			link("etc/hosts", outside+"/hosts"), link("etc/resolv.conf", up+"/resolv.conf"), link("etc/hostname", "/none/deep/hostname"),
			link("etc/mtab", outside+"/mtab"),
			{name: "etc/passwd", body: passwd},
		}, codes.OK, codes.OK},
	}
	var made []fixture.Image
	names := map[string]string{}
	for name, c := range tests {
		names[name] = fmt.Sprintf("registry.k8s.io/crisp-tests/links-%d:1", len(made))
		made = append(made, derived(t, names[name], func(cfg *v1.Config) { cfg.User = "" }, layerOf(t, c.layer...)))
	}
	all := startWith(t, testenv.Setup{}, made...)
	pod, config := all.pod("links")
	for name, c := range tests {
		t.Run(name, func(t *testing.T) {
			s := &system{System: all.System, t: t}
			before := listing(t, outside)
			for user, want := range map[string]codes.Code{"me": c.byName, "77": c.number, "": c.number} {
				cfg := containerConfig(strings.ReplaceAll(name, " ", "-")+user, "sleep 1000")
				cfg.Image.Image = names[name]
				sc := &criv1.LinuxContainerSecurityContext{}
				switch user {
				case "me":
					sc.RunAsUsername = user
				case "77":
					sc.RunAsUser = &criv1.Int64Value{Value: 77}
				}
				cfg.Linux.SecurityContext = sc
				id, err := s.create(pod, config, cfg)
				if status.Code(err) != want {
					t.Errorf("user %q: %v, want %s", user, err, want)
				}
				if err != nil {
					continue
				}
				if err := s.start(id); err != nil {
					t.Errorf("user %q: %v", user, err)
					continue
				}
				uid := strings.TrimSpace(s.exec(id, "sh", "-c", "cat /etc/hosts > /dev/null && id -u"))
				if (user == "") != (uid == "0") || user != "" && uid != "77" {
					t.Errorf("user %q runs as %s", user, uid)
				}
			}
			if after := listing(t, outside); !slices.Equal(before, after) {
				t.Errorf("the node has %v, had %v", after, before)
			}
		})
	}
}
