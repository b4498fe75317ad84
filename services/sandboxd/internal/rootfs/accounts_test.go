package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestReadInRoot(t *testing.T) {
	write := func(t *testing.T, path, data string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := func(t *testing.T, to, at string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, at); err != nil {
			t.Fatal(err)
		}
	}
	tests := map[string]struct {
		make func(t *testing.T, root string)
		want string
		err  error
	}{
		"plain":       {make: func(t *testing.T, root string) { t.Helper(); write(t, root+"/etc/passwd", "in") }, want: "in"},
		"no etc":      {make: func(*testing.T, string) {}},
		"etc is file": {make: func(t *testing.T, root string) { t.Helper(); write(t, root+"/etc", "x") }},
		"absolute link": {make: func(t *testing.T, root string) {
			t.Helper()
			write(t, root+"/usr/lib/passwd", "in")
			link(t, "/usr/lib/passwd", root+"/etc/passwd")
		}, want: "in"},
		"absolute etc": {make: func(t *testing.T, root string) {
			t.Helper()
			write(t, root+"/real/passwd", "in")
			link(t, "/real", root+"/etc")
		}, want: "in"},
		"link out": {make: func(t *testing.T, root string) {
			t.Helper()
			write(t, root+"/../secret/passwd", "out")
			link(t, "../../../../secret", root+"/etc")
		}},
		"link to host": {make: func(t *testing.T, root string) { t.Helper(); link(t, filepath.Dir(root)+"/host", root+"/etc/passwd") }},
		"dangling":     {make: func(t *testing.T, root string) { t.Helper(); link(t, "nowhere", root+"/etc/passwd") }},
		"loop":         {make: func(t *testing.T, root string) { t.Helper(); link(t, "passwd", root+"/etc/passwd") }, err: errdefs.ErrFailedPrecondition},
		"folder":       {make: func(t *testing.T, root string) { t.Helper(); write(t, root+"/etc/passwd/x", "") }, err: errdefs.ErrFailedPrecondition},
		"pipe": {make: func(t *testing.T, root string) {
			t.Helper()
			write(t, root+"/etc/x", "")
			if err := unix.Mkfifo(root+"/etc/passwd", 0o600); err != nil {
				t.Fatal(err)
			}
		}, err: errdefs.ErrFailedPrecondition},
		"largest": {make: func(t *testing.T, root string) {
			t.Helper()
			write(t, root+"/etc/passwd", strings.Repeat("x", maxAccountFile))
		}, want: strings.Repeat("x", maxAccountFile)},
		"larger": {make: func(t *testing.T, root string) {
			t.Helper()
			write(t, root+"/etc/passwd", strings.Repeat("x", maxAccountFile+1))
		}, err: errdefs.ErrFailedPrecondition},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			write(t, top+"/host", "out")
			root := filepath.Join(top, "root")
			if err := os.Mkdir(root, 0o755); err != nil {
				t.Fatal(err)
			}
			tt.make(t, root)
			got, err := readInRoot(root, "etc/passwd")
			if !errors.Is(err, tt.err) {
				t.Fatalf("error %v, want %v", err, tt.err)
			}
			if string(got) != tt.want {
				t.Errorf("read %.20q, want %.20q", got, tt.want)
			}
		})
	}
}

func TestAccountCache(t *testing.T) {
	c := newAccountCache(2)
	for i := range 2 {
		c.put(fmt.Sprint(i), pod.Accounts{Passwd: []byte{byte(i)}})
	}
	if _, ok := c.get("0"); !ok {
		t.Error("0 is gone")
	}
	c.put("2", pod.Accounts{})
	if _, ok := c.get("1"); ok {
		t.Error("1 was used least and is still there")
	}
	if a, ok := c.get("0"); !ok || a.Passwd[0] != 0 {
		t.Error("0 is gone")
	}
}
