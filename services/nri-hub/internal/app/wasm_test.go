package app_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// leb is a number in WebAssembly's form for unsigned ones.
func leb(n uint64) []byte { return binary.AppendUvarint(nil, n) }

// sleb is the form for signed ones.
func sleb(n int64) []byte {
	var b []byte
	for {
		c := byte(n & 0x7f)
		n >>= 7
		if n == 0 && c&0x40 == 0 || n == -1 && c&0x40 != 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}

func section(id byte, items ...[]byte) []byte {
	body := leb(uint64(len(items)))
	for _, i := range items {
		body = append(body, i...)
	}
	return append(append([]byte{id}, leb(uint64(len(body)))...), body...)
}

func sized(b []byte) []byte { return append(leb(uint64(len(b))), b...) }

// wasmPlugin assembles a plugin that answers calls with fixed messages, or never returns
// from those that hang.
func wasmPlugin(t *testing.T, answers map[string]proto.Message, hang ...string) []byte {
	t.Helper()
	methods := []string{
		"configure", "synchronize", "shutdown", "run_pod_sandbox", "update_pod_sandbox", "post_update_pod_sandbox",
		"stop_pod_sandbox", "remove_pod_sandbox", "create_container", "post_create_container", "start_container",
		"post_start_container", "update_container", "post_update_container", "stop_container", "remove_container",
		"state_change", "validate_container_adjustment",
	}
	const i32, i64 = 0x7f, 0x7e
	types := section(1,
		[]byte{0x60, 2, i32, i32, 1, i64}, // a method
		[]byte{0x60, 1, i32, 1, i32},      // malloc
		[]byte{0x60, 1, i32, 0},           // free
		[]byte{0x60, 0, 1, i64},           // plugin_api_version
	)
	var funcs, exports, code, data [][]byte
	export := func(name string, typ byte, body ...byte) {
		exports = append(exports, append(sized([]byte(name)), append([]byte{0}, leb(uint64(len(funcs)))...)...))
		funcs = append(funcs, []byte{typ})
		code = append(code, sized(append(append([]byte{0}, body...), 0x0b)))
	}
	constant := func(n int64) []byte { return append([]byte{0x42}, sleb(n)...) }
	offset := 64
	for _, m := range methods {
		body := constant(0)
		if msg, ok := answers[m]; ok {
			b, err := proto.Marshal(msg)
			if err != nil {
				t.Fatal(err)
			}
			at := append(append([]byte{0, 0x41}, sleb(int64(offset))...), 0x0b)
			data = append(data, append(at, sized(b)...))
			body = constant(int64(offset)<<32 | int64(len(b)))
			offset += len(b)
		}
		for _, h := range hang {
			if h == m {
				body = append([]byte{0x03, 0x40, 0x0c, 0, 0x0b}, body...)
			}
		}
		export("plugin_"+m, 0, body...)
	}
	const heap = 1 << 16
	export("malloc", 1, append([]byte{0x41}, sleb(heap)...)...)
	export("free", 2)
	export("plugin_api_version", 3, constant(1)...)
	exports = append(exports, append(sized([]byte("memory")), 2, 0))
	return bytes.Join([][]byte{
		[]byte("\x00asm\x01\x00\x00\x00"), types, section(3, funcs...), section(5, []byte{0, 64}),
		section(7, exports...), section(10, code...), section(11, data...),
	}, nil)
}

// A WebAssembly file in the plugin folder is a plugin like the others.
func TestWasmPlugin(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	if err := os.MkdirAll(cfg.Launch.Folder, 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(name string, content []byte) {
		if err := os.WriteFile(filepath.Join(cfg.Launch.Folder, name), content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	put("10-wasm", wasmPlugin(t, map[string]proto.Message{
		"configure":        &nri.ConfigureResponse{Events: int32(1<<(nri.Event_CREATE_CONTAINER-1) | 1<<20)},
		"create_container": &nri.CreateContainerResponse{Adjust: env("WASM", "yes")},
	}))
	put("20-broken", []byte("\x00asm\x01\x00\x00\x00 and no more"))
	h := startHub(t, cfg)
	g := h.connect()
	g.await(t, "10-wasm")
	for i := range 3 {
		resp, err := g.create(t.Context(), fmt.Sprint("c", i))
		if err != nil || len(resp.GetAdjust().GetEnv()) != 1 || resp.GetAdjust().GetEnv()[0].GetKey() != "WASM" {
			t.Fatalf("answer is %v, %v", resp, err)
		}
	}
	if p, _ := g.plugin(t.Context(), "10-wasm"); p.GetKind() != "wasm" || nri.EventMask(p.GetEvents()) != 1<<(nri.Event_CREATE_CONTAINER-1) {
		t.Errorf("told is %v", p)
	}
	// What was compiled is kept.
	kept := 0
	_ = filepath.WalkDir(cfg.Launch.WasmCache, func(_ string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			kept++
		}
		return nil
	})
	if kept == 0 {
		t.Error("nothing was kept in the cache")
	}
	if err := os.Remove(filepath.Join(cfg.Launch.Folder, "10-wasm")); err != nil {
		t.Fatal(err)
	}
	g.await(t)
}

// A module that hangs is ended at its time limit and loaded anew; requests go on.
func TestWasmPluginThatHangs(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{hanging("loop", 300*time.Millisecond)}
	cfg.Launch.MinBackoff = config.Duration(5 * time.Second) // long enough to see it gone
	if err := os.MkdirAll(cfg.Launch.Folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(cfg.Launch.Folder, "10-loop"), wasmPlugin(t, map[string]proto.Message{
		"configure": &nri.ConfigureResponse{Events: 1 << (nri.Event_CREATE_CONTAINER - 1)},
	}, "create_container"), 0o755); err != nil {
		t.Fatal(err)
	}
	h := startHub(t, cfg)
	g := h.connect()
	g.await(t, "10-loop")
	if _, err := g.create(t.Context(), "c1"); err != nil {
		t.Errorf("the request fails: %v", err)
	}
	g.await(t)
	g.await(t, "10-loop")
}

// What is launched can have variables and limits of its own, and a folder may come later.
func TestLaunchedPluginsSurroundings(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{{Name: "self", Launch: hubconfig.Limits{
		Env: map[string]string{"EXTRA": "yes"}, Rlimits: map[string]uint64{"nofile": 77, "core": 0},
	}}}
	var log testkit.Buffer
	tel, spans := testkit.TelemetryTo(t, &log)
	h := startHubWith(t, cfg, tel, spans)
	g := h.connect()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(cfg.Launch.Folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(cfg.Launch.Folder, "10-self")); err != nil {
		t.Fatal(err)
	}
	g.await(t, "10-self")
	p, _ := g.plugin(t.Context(), "10-self")
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.GetPid()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(limits)) {
		if strings.HasPrefix(line, "Max open files") && !strings.Contains(line, "77 ") {
			t.Errorf("limit is %q", line)
		}
	}
	testkit.Eventually(t, patience, func() error {
		if !strings.Contains(log.String(), "NRI_PLUGIN_SOCKET=3 EXTRA=yes") {
			return fmt.Errorf("environment is not in the log")
		}
		return nil
	})
}

// A hub that cannot keep what it compiled works without.
func TestWasmCacheThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Launch.WasmCache = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(cfg.Launch.WasmCache, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	startHub(t, cfg).connect()
}
