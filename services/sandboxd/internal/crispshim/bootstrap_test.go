package crispshim

import (
	"testing"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

func TestParseParams(t *testing.T) {
	dir := "/run/x"
	sent := &bootapi.BootstrapParams{
		InstanceID: "id", Namespace: "ns", LogLevel: bootapi.LogLevel_LOG_LEVEL_TRACE, ContainerdVersion: "v",
		ContainerdTtrpcAddress: "/t", ContainerdGrpcAddress: "/g", ContainerdBinary: "/b", SocketDir: &dir,
	}
	o := &options.Options{BinaryName: "crun", ShimCgroup: "/shims"}
	value, err := proto.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []*anypb.Any{{TypeUrl: "other", Value: []byte("x")}, {TypeUrl: optionsType, Value: value}} {
		sent.Extensions = append(sent.Extensions, &bootapi.Extension{Value: a})
	}
	data, err := proto.Marshal(sent)
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseParams(data)
	if err != nil {
		t.Fatal(err)
	}
	want := bootParams{id: "id", namespace: "ns", address: "/g", socketDir: dir, debug: true, options: value}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(bootParams{})); diff != "" {
		t.Error(diff)
	}
	if path, err := got.shimCgroup(); err != nil || path != "/shims" {
		t.Errorf("cgroup %q, %v", path, err)
	}
	if _, err := parseParams(data[:len(data)-3]); !errdefs.IsInvalidArgument(err) {
		t.Errorf("cut parameters: %v", err)
	}
}

func FuzzParseParams(f *testing.F) {
	f.Add([]byte("\x0a\x02id\x12\x02ns"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var want bootapi.BootstrapParams
		got, err := parseParams(data)
		if proto.Unmarshal(data, &want) != nil {
			return
		}
		if err != nil || got.id != want.GetInstanceID() || got.namespace != want.GetNamespace() || got.socketDir != want.GetSocketDir() {
			t.Errorf("%+v, %v, want %v", got, err, &want)
		}
	})
}

func TestBootResult(t *testing.T) {
	var r bootapi.BootstrapResult
	if err := proto.Unmarshal(bootResult("/run/s"), &r); err != nil {
		t.Fatal(err)
	}
	if r.GetVersion() != 3 || r.GetAddress() != "unix:///run/s" || r.GetProtocol() != "ttrpc" {
		t.Errorf("%v", &r)
	}
}

func TestConstantMapping(t *testing.T) {
	const program = "/bin/shim"
	for line, want := range map[string]bool{
		"00400000-00500000 r-xp 00000000 fe:00 12 /bin/shim\n":           true,
		"00500000-00600000 r--p 00100000 fe:00 12 /bin/shim\n":           true,
		"00600000-00610000 rw-p 00200000 fe:00 12 /bin/shim\n":           false,
		"7f000000-7f100000 r-xp 00000000 fe:00 13 /lib/libc.so.6\n":      false,
		"7ffc0000-7ffd0000 r-xp 00000000 00:00 0 [vdso]\n":               false,
		"c000000000-c000400000 rw-p 00000000 00:00 0 \n":                 false,
		"nonsense r--p 00100000 fe:00 12 /bin/shim\n":                    false,
		"00600000-00500000 r--p 00100000 fe:00 12 /bin/shim\n":           false,
		"00400000-00500000 r-xp 00000000 fe:00 12 /bin/shim (deleted)\n": false,
	} {
		if _, size, ok := constantMapping([]byte(line), program); ok != want || (ok && size != 0x100000) {
			t.Errorf("%q: %v, %#x", line, ok, size)
		}
	}
}

func TestParse(t *testing.T) {
	for _, args := range [][]string{{}, {"-id", "x"}, {"-nonsense"}} {
		if err := Main(t.Context(), args, nil, discard{}, discard{}); err == nil {
			t.Errorf("%v was accepted", args)
		}
	}
	if err := Main(t.Context(), []string{"-namespace", "n", "dance"}, nil, discard{}, discard{}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("unknown action: %v", err)
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
