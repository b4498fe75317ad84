package podfiles

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func files(t *testing.T) *Files {
	t.Helper()
	dir := t.TempDir()
	etc := filepath.Join(dir, "etc")
	if err := os.Mkdir(etc, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"hosts": "10.9.8.7 node\n", "resolv.conf": "nameserver 10.9.8.1\n"} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return New(Config{StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), HostEtc: etc})
}

// config is a pod that shares the node's IPC, so that nothing is mounted.
func config(network criv1.NamespaceMode, hostname string, dns *criv1.DNSConfig) *criv1.PodSandboxConfig {
	return &criv1.PodSandboxConfig{
		Hostname: hostname, DnsConfig: dns,
		Linux: &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{
			NamespaceOptions: &criv1.NamespaceOption{Ipc: criv1.NamespaceMode_NODE, Network: network},
		}},
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestMake(t *testing.T) {
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	f := files(t)
	dns := &criv1.DNSConfig{Servers: []string{"10.0.0.10", "fd00::a"}, Searches: []string{"a.svc", "b"}, Options: []string{"ndots:5"}}
	got, err := f.Make(t.Context(), "id", config(criv1.NamespaceMode_POD, "web-0", dns))
	if err != nil {
		t.Fatal(err)
	}
	if want := "search a.svc b\nnameserver 10.0.0.10\nnameserver fd00::a\noptions ndots:5\n"; read(t, got.ResolvConf) != want {
		t.Errorf("resolv.conf %q", read(t, got.ResolvConf))
	}
	if read(t, got.Hostname) != "web-0\n" {
		t.Errorf("hostname %q", read(t, got.Hostname))
	}
	if hosts := read(t, got.Hosts); !strings.Contains(hosts, "127.0.0.1\tlocalhost\n") || strings.Contains(hosts, "10.9.8.7") {
		t.Errorf("hosts %q", hosts)
	}
	if got.Shm != "/dev/shm" {
		t.Errorf("shm %q", got.Shm)
	}
	for _, path := range []string{got.Hosts, got.Hostname, got.ResolvConf} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o644 {
			t.Errorf("%s: %v, %v", path, st.Mode(), err)
		}
	}
	dir := filepath.Dir(got.Hosts)
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != passable {
		t.Errorf("%s: %v, %v", dir, st, err)
	}
	if again := f.Paths("id", config(criv1.NamespaceMode_POD, "", nil)); again != got {
		t.Errorf("paths %v, made %v", again, got)
	}
	for range 2 {
		if err := f.Remove(t.Context(), "id"); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", dir, err)
	}
}

func TestMakeOnHostNetwork(t *testing.T) {
	t.Parallel()
	f := files(t)
	got, err := f.Make(t.Context(), "id", config(criv1.NamespaceMode_NODE, "ignored", nil))
	if err != nil {
		t.Fatal(err)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if read(t, got.Hostname) != host+"\n" {
		t.Errorf("hostname %q", read(t, got.Hostname))
	}
	if read(t, got.Hosts) != "10.9.8.7 node\n" || read(t, got.ResolvConf) != "nameserver 10.9.8.1\n" {
		t.Errorf("hosts %q, resolv.conf %q", read(t, got.Hosts), read(t, got.ResolvConf))
	}
}

func TestMakeRefuses(t *testing.T) {
	t.Parallel()
	tests := map[string]*criv1.PodSandboxConfig{
		"host name with a line end":  config(criv1.NamespaceMode_POD, "a\nb", nil),
		"long host name":             config(criv1.NamespaceMode_POD, strings.Repeat("a", 65), nil),
		"server with a line end":     config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Servers: []string{"1.2.3.4\nsearch x"}}),
		"server that is a name":      config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Servers: []string{"dns"}}),
		"search with a line end":     config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Searches: []string{"x\nnameserver 6.6.6.6"}}),
		"search with a space":        config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Searches: []string{"x y"}}),
		"long search domain":         config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Searches: []string{strings.Repeat("x", 256)}}),
		"long search list":           config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Searches: repeat(strings.Repeat("x", 200), 11)}),
		"option with a return":       config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Options: []string{"x\ry"}}),
		"empty option":               config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Options: []string{""}}),
		"search with broken unicode": config(criv1.NamespaceMode_POD, "a", &criv1.DNSConfig{Searches: []string{"\xff"}}),
	}
	for name, cfg := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := files(t)
			if _, err := f.Make(t.Context(), "id", cfg); !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("error %v", err)
			}
			if _, err := os.Stat(f.stateDir("id")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("something is left: %v", err)
			}
		})
	}
}

func repeat(s string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = s
	}
	return out
}

func TestBadIDs(t *testing.T) {
	t.Parallel()
	f := files(t)
	for _, id := range []string{"", ".", "..", "a/b", "../x"} {
		if err := f.Remove(t.Context(), id); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func FuzzResolvConf(f *testing.F) {
	f.Add("10.0.0.10", "svc.local", "ndots:5")
	f.Fuzz(func(t *testing.T, server, search, option string) {
		text, err := resolvConf(&criv1.DNSConfig{Servers: []string{server}, Searches: []string{search}, Options: []string{option}})
		if err == nil && strings.Count(text, "\n") != 3 {
			t.Errorf("%q", text)
		}
	})
}

// A process that is killed while it writes a file leaves a temporary one beside it.
func TestRemoveAfterAnInterruptedMake(t *testing.T) {
	dir := t.TempDir()
	f := New(Config{StateDir: dir, RunDir: filepath.Join(dir, "run")})
	pod := filepath.Join(dir, "sandboxes", "sb")
	if err := os.MkdirAll(pod, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"hosts", "1234567"} {
		if err := os.WriteFile(filepath.Join(pod, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Remove(t.Context(), "sb"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(pod); !os.IsNotExist(err) {
		t.Errorf("the folder is still there: %v", err)
	}
}
