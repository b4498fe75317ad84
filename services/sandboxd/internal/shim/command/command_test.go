package command

import (
	"strings"
	"testing"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/link"
)

func result(t testing.TB, version int32, address, protocol string) string {
	t.Helper()
	data, err := proto.Marshal(&bootapi.BootstrapResult{Version: version, Address: address, Protocol: protocol})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestParseAnswer(t *testing.T) {
	for _, tc := range []struct {
		name, answer string
		want         link.Endpoint
		is           func(error) bool
	}{
		{"message", result(t, 3, "unix:///a/b", "ttrpc"), link.Endpoint{Version: 3, Address: "unix:///a/b", Protocol: "ttrpc"}, nil},
		{"grpc", result(t, 3, "unix:///a/b", "GRPC"), link.Endpoint{Version: 3, Address: "unix:///a/b", Protocol: "grpc"}, nil},
		{"no protocol", result(t, 2, "unix:///a/b", ""), link.Endpoint{Version: 2, Address: "unix:///a/b", Protocol: "ttrpc"}, nil},
		{"json", ` {"version":3,"address":"unix:///x","protocol":"ttrpc"}` + "\n", link.Endpoint{Version: 3, Address: "unix:///x", Protocol: "ttrpc"}, nil},
		{"plain", "unix:///run/containerd/s/0123\n", link.Endpoint{Version: 2, Address: "unix:///run/containerd/s/0123", Protocol: "ttrpc"}, nil},
		{"abstract", "/containerd-shim/abc.sock", link.Endpoint{Version: 2, Address: "/containerd-shim/abc.sock", Protocol: "ttrpc"}, nil},
		{"future", result(t, 4, "unix:///a", "ttrpc"), link.Endpoint{}, errdefs.IsNotImplemented},
		{"odd protocol", result(t, 3, "unix:///a", "carrier pigeon"), link.Endpoint{}, errdefs.IsNotImplemented},
		{"grpc version 2", result(t, 2, "unix:///a", "grpc"), link.Endpoint{}, errdefs.IsNotImplemented},
		{"nothing", "", link.Endpoint{}, errdefs.IsInternal},
		{"words", "panic: runtime error: /bin/x", link.Endpoint{}, errdefs.IsInternal},
		{"long", "unix:///" + strings.Repeat("x", 600), link.Endpoint{}, errdefs.IsInternal},
		{"cut json", `{"version":3,"addr`, link.Endpoint{}, errdefs.IsInternal},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := parseAnswer([]byte(tc.answer))
			if tc.is != nil {
				if !tc.is(err) {
					t.Errorf("got %+v, %v", got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func FuzzParseAnswer(f *testing.F) {
	f.Add([]byte(result(f, 3, "unix:///a/b", "ttrpc")))
	f.Add([]byte(`{"version":3,"address":"unix:///x","protocol":"grpc"}`))
	f.Add([]byte("unix:///run/x\n"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		e, err := parseAnswer(answer)
		if err != nil {
			return
		}
		if !plausibleAddress(e.Address) || (e.Version != 2 && e.Version != 3) {
			t.Errorf("accepted %+v", e)
		}
		dir := t.TempDir()
		if err := SaveEndpoint(dir, e); err != nil {
			t.Fatal(err)
		}
		if again, err := LoadEndpoint(dir); err != nil || again != e {
			t.Errorf("wrote %+v, read %+v, %v", e, again, err)
		}
	})
}

func TestOptions(t *testing.T) {
	a, err := Options(pod.Handler{RuntimeType: "io.containerd.runc.v2", BinaryName: "crun", Root: "/r", SystemdCgroup: true})
	if err != nil {
		t.Fatal(err)
	}
	var runc runcoptions.Options
	if a.GetTypeUrl() != "containerd.runc.v1.Options" || proto.Unmarshal(a.GetValue(), &runc) != nil ||
		runc.GetBinaryName() != "crun" || runc.GetRoot() != "/r" || !runc.GetSystemdCgroup() {
		t.Errorf("runc options %v %v", a.GetTypeUrl(), &runc)
	}
	if a, err := Options(pod.Handler{RuntimeType: "io.containerd.kata.v2"}); a != nil || err != nil {
		t.Errorf("no options: %v, %v", a, err)
	}
	for _, tc := range []struct {
		name string
		in   map[string]any
		want *runtimeoptions.Options
	}{
		{"path", map[string]any{"ConfigPath": "/c", "TypeUrl": "t"}, &runtimeoptions.Options{ConfigPath: "/c", TypeUrl: "t"}},
		{"document", map[string]any{"debug": true}, &runtimeoptions.Options{ConfigBody: []byte("debug = true\n")}},
		{"not text", map[string]any{"ConfigPath": 1}, nil},
		{"both", map[string]any{"ConfigPath": "/c", "debug": true}, nil},
	} {
		a, err := Options(pod.Handler{RuntimeType: "io.containerd.kata.v2", Options: tc.in})
		if tc.want == nil {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		var got runtimeoptions.Options
		if err != nil || proto.Unmarshal(a.GetValue(), &got) != nil || !proto.Equal(&got, tc.want) {
			t.Errorf("%s: %v, %v", tc.name, &got, err)
		}
	}
}
