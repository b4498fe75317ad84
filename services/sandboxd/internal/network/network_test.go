package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/internal/testkit"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/network/runtimeconf"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// bench is a folder with plugins that are shell scripts and with a CNI that uses them.
type bench struct {
	*CNI

	t   *testing.T
	dir string
}

func newBench(t *testing.T, change func(*Config)) *bench {
	t.Helper()
	b := &bench{t: t, dir: t.TempDir()}
	cfg := Config{
		Folder: Folder{ConfDir: filepath.Join(b.dir, "conf"), MaxConfNum: 1}, BinDirs: []string{filepath.Join(b.dir, "bin")},
		StateDir: filepath.Join(b.dir, "state"), Timeout: testkit.Patience,
	}
	if change != nil {
		change(&cfg)
	}
	for _, d := range []string{cfg.ConfDir, cfg.BinDirs[0]} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b.CNI = New(t.Context(), cfg, slog.New(slog.DiscardHandler), noop.NewTracerProvider().Tracer(""))
	return b
}

func (b *bench) write(name, content string, mode os.FileMode) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, name), []byte(content), mode); err != nil {
		b.t.Fatal(err)
	}
}

// plugin makes a plugin that logs its calls and then runs a piece of shell.
func (b *bench) plugin(name, body string) {
	b.write("bin/"+name, fmt.Sprintf(`#!/bin/sh
conf=$(cat)
echo "$CNI_COMMAND %s $CNI_IFNAME netns=$CNI_NETNS" >> %s/log
echo "$conf" > %s/stdin.$CNI_COMMAND.%s
env > %s/env.$CNI_COMMAND.%s
%s
`, name, b.dir, b.dir, name, b.dir, name, body), 0o755)
}

const (
	gives = `[ $CNI_COMMAND = ADD ] && echo '{"cniVersion":"1.0.0","ips":[{"address":"fd00::2/64"},{"address":"10.0.0.2/24"}]}'; exit 0`
	fails = `echo '{"cniVersion":"1.0.0","code":11,"msg":"no room"}'; exit 1`
)

func (b *bench) list(file string, plugins ...string) {
	var out []string
	for _, p := range plugins {
		out = append(out, fmt.Sprintf(`{"type":%q,"capabilities":{"portMappings":true,"bandwidth":true,"dns":true}}`, p))
	}
	b.write("conf/"+file, fmt.Sprintf(`{"cniVersion":"1.0.0","name":%q,"plugins":[%s]}`,
		strings.TrimSuffix(file, ".conflist"), strings.Join(out, ",")), 0o644)
	b.reload()
}

func (b *bench) calls() []string {
	raw, err := os.ReadFile(filepath.Join(b.dir, "log"))
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(raw)), "\n")
}

func (b *bench) remembered() int {
	files, err := filepath.Glob(filepath.Join(b.cfg.StateDir, "attached", "*"))
	if err != nil {
		b.t.Fatal(err)
	}
	return len(files)
}

func request() pod.NetworkRequest {
	return pod.NetworkRequest{
		SandboxID: strings.Repeat("a", 64), NetnsPath: "/no/such/netns",
		Config: &criv1.PodSandboxConfig{
			Metadata:     &criv1.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u-1"},
			PortMappings: []*criv1.PortMapping{{HostPort: 8080, ContainerPort: 80}, {ContainerPort: 81}},
			DnsConfig:    &criv1.DNSConfig{Servers: []string{"10.0.0.10"}},
			Annotations:  map[string]string{runtimeconf.AnnotationIngress: "10M"},
		},
	}
}

func TestAttachAndDetach(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("good", gives)
	b.list("10-a.conflist", "good")
	sc := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}})
	result, err := b.Attach(trace.ContextWithSpanContext(t.Context(), sc), request())
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"10.0.0.2", "fd00::2"}; !slices.Equal(result.IPs, want) {
		t.Errorf("addresses %v, want %v", result.IPs, want)
	}
	stdin := b.read("stdin.ADD.good")
	for _, want := range []string{
		`"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]`,
		`"ingressRate":10000000`, `"servers":["10.0.0.10"]`,
	} {
		if !strings.Contains(stdin, want) {
			t.Errorf("plugin was not given %s in %s", want, stdin)
		}
	}
	env := b.read("env.ADD.good")
	for _, want := range []string{
		"K8S_POD_NAME=web;", "K8S_POD_NAMESPACE=default;", "K8S_POD_UID=u-1",
		"TRACEPARENT=00-01000000000000000000000000000000-0200000000000000-",
	} {
		if !strings.Contains(env, want) {
			t.Errorf("plugin's environment lacks %s", want)
		}
	}
	// Neither the configuration nor the library's cache nor what was remembered is needed.
	for _, d := range []string{"conf", "state"} {
		if err := os.RemoveAll(filepath.Join(b.dir, d)); err != nil {
			t.Fatal(err)
		}
	}
	b.reload()
	for range 2 {
		if err := b.Detach(t.Context(), request(), result.Raw); err != nil {
			t.Fatal(err)
		}
	}
	if stdin := b.read("stdin.DEL.good"); !strings.Contains(stdin, `"prevResult":{"cniVersion"`) {
		t.Errorf("DEL was not given the result: %s", stdin)
	}
	want := []string{"ADD good eth0 netns=/no/such/netns", "DEL good eth0 netns=", "DEL good eth0 netns="}
	if diff := cmp.Diff(want, b.calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func (b *bench) read(name string) string {
	b.t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.dir, name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(raw)
}

func TestDetachAfterAFailedChain(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("good", gives)
	b.list("10-a.conflist", "good", "missing")
	if _, err := b.Attach(t.Context(), request()); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Fatalf("error %v", err)
	}
	// The chain cannot be taken apart while a part is missing; that must not be forgotten,
	// even if the configuration is gone by then.
	if err := b.Detach(t.Context(), request(), nil); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Fatalf("error %v", err)
	}
	if err := os.Remove(filepath.Join(b.dir, "conf/10-a.conflist")); err != nil {
		t.Fatal(err)
	}
	b.reload()
	b.plugin("missing", "exit 0")
	if n := b.remembered(); n != 1 {
		t.Fatalf("%d attachments remembered, want 1", n)
	}
	for range 2 {
		if err := b.Detach(t.Context(), request(), nil); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"ADD good eth0 netns=/no/such/netns", "DEL missing eth0 netns=", "DEL good eth0 netns="}
	if diff := cmp.Diff(want, b.calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if n := b.remembered(); n != 0 {
		t.Errorf("%d attachments remembered, want 0", n)
	}
}

func TestDetachGoesOnAfterAFailingNetwork(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.MaxConfNum = 0 })
	b.plugin("good", gives)
	b.plugin("bad", fails)
	b.list("10-a.conflist", "good")
	b.list("20-b.conflist", "bad")
	_, err := b.Attach(t.Context(), request())
	if err == nil || !strings.Contains(err.Error(), "no room") || !strings.Contains(err.Error(), "20-b") {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Detach(ctx, request(), nil); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("error %v", err)
	}
	if !slices.Contains(b.calls(), "DEL good eth0 netns=") {
		t.Errorf("the good network was not detached: %v", b.calls())
	}
}

func TestAttachKillsAHangingPlugin(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Timeout = 300 * time.Millisecond })
	b.plugin("hangs", `sleep 1000 & sleep 1000`)
	b.list("10-a.conflist", "hangs")
	start := time.Now()
	_, err := b.Attach(t.Context(), request())
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if d := time.Since(start); d > testkit.Patience {
		t.Errorf("took %s", d)
	}
}

// A plugin that is killed between two steps may leave what its DEL does not find.
func TestCancelledAttachLetsAPluginEnd(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("steps", `{ sleep 0.6; touch `+b.dir+`/outlived; } >/dev/null 2>&1 & touch `+b.dir+`/begun; sleep 0.3; touch `+b.dir+`/ended; `+gives)
	b.list("10-a.conflist", "steps")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		for !b.exists("begun") && t.Context().Err() == nil {
			time.Sleep(time.Millisecond)
		}
	}()
	_, err := b.Attach(ctx, request())
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if !b.exists("ended") {
		t.Error("the plugin was killed between its steps")
	}
	time.Sleep(500 * time.Millisecond)
	if b.exists("outlived") {
		t.Error("what the plugin left behind goes on")
	}
}

func TestAttachWithoutConfiguration(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	if err := b.Ready(); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "cni plugin not initialized") {
		t.Errorf("ready: %v", err)
	}
	if _, err := b.Attach(t.Context(), request()); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("attach: %v", err)
	}
	if err := b.Detach(t.Context(), request(), nil); err != nil {
		t.Errorf("detach: %v", err)
	}
}

func TestPluginsRunABoundedNumberAtATime(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.MaxParallel = 1; c.MaxConfNum = 0 })
	b.plugin("one", `mkdir `+b.dir+`/lock || exit 1; sleep 0.1; rmdir `+b.dir+`/lock; `+gives)
	for i := range 4 {
		b.list(fmt.Sprintf("%d.conflist", i), "one")
	}
	if _, err := b.Attach(t.Context(), request()); err != nil {
		t.Error(err)
	}
}

func TestConfigurationFolderComesAndGoes(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.ConfDir = filepath.Join(c.ConfDir, "etc", "cni") })
	if err := os.RemoveAll(filepath.Dir(b.cfg.ConfDir)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	ready := make(chan struct{})
	go func() { done <- b.Run(ctx, func() { close(ready) }) }()
	<-ready
	list := `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"x"}]}`
	for range 2 {
		if err := os.MkdirAll(b.cfg.ConfDir, 0o755); err != nil {
			t.Fatal(err)
		}
		b.put("n.conflist", list)
		b.eventually("ready", func() bool { return b.Ready() == nil })
		b.put("n.conflist", "{")
		b.eventually("broken", func() bool { return b.Ready() != nil })
		if n, err := b.current(""); err != nil || len(n) != 1 {
			t.Errorf("the last good configuration is not in use: %v, %v", n, err)
		}
		b.put("n.conflist", list)
		b.eventually("ready again", func() bool { return b.Ready() == nil })
		if err := os.RemoveAll(filepath.Dir(b.cfg.ConfDir)); err != nil {
			t.Fatal(err)
		}
		b.eventually("gone", func() bool { _, err := b.current(""); return err != nil })
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func (b *bench) put(name, content string) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.cfg.ConfDir, name), []byte(content), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) eventually(what string, cond func() bool) {
	b.t.Helper()
	testkit.Eventually(b.t, testkit.Patience, func() error {
		if !cond() {
			return fmt.Errorf("not %s: %w", what, b.Ready())
		}
		return nil
	})
}

func TestSetPodCIDR(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Template = filepath.Join(filepath.Dir(c.ConfDir), "template") })
	b.write("template", `{"cniVersion":"1.0.0","name":"made","plugins":[{"type":"x","subnet":"{{.PodCIDR}}",
		"routes":[{{range $i, $r := .Routes}}{{if $i}},{{end}}{"dst":"{{$r}}"}{{end}}]}]}`, 0o644)
	if err := b.SetPodCIDR(t.Context(), "nonsense"); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("error %v", err)
	}
	if err := b.SetPodCIDR(t.Context(), "10.1.0.0/24,fd00:1::/64"); err != nil {
		t.Fatal(err)
	}
	if err := b.Ready(); err != nil {
		t.Error(err)
	}
	made := b.read("conf/" + madeFile)
	if !strings.Contains(made, `"subnet":"10.1.0.0/24"`) || !strings.Contains(made, `{"dst":"0.0.0.0/0"},{"dst":"::/0"}`) {
		t.Errorf("made %s", made)
	}
	b.list("05-other.conflist", "x")
	if err := b.SetPodCIDR(t.Context(), "10.2.0.0/24"); err != nil {
		t.Fatal(err)
	}
	if again := b.read("conf/" + madeFile); again != made {
		t.Error("a configuration of somebody else's was overridden")
	}
}

// A template or folder that is no good is an error that says so, and what was made before
// stays; what is as it should be is not written again.
func TestSetPodCIDRWhenThingsAreWrong(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Template = filepath.Join(filepath.Dir(c.ConfDir), "template") })
	good := `{"cniVersion":"1.0.0","name":"made","plugins":[{"type":"x","ranges":[{{range $i, $r := .PodCIDRRanges}}{{if $i}},{{end}}"{{$r}}"{{end}}]}]}`
	b.write("template", good, 0o644)
	const cidrs = "10.1.0.7/24, fd00:1::/64"
	if err := b.SetPodCIDR(t.Context(), cidrs); err != nil {
		t.Fatal(err)
	}
	made := b.read("conf/" + madeFile)
	if !strings.Contains(made, `["10.1.0.0/24","fd00:1::/64"]`) {
		t.Errorf("made %s", made)
	}
	file := filepath.Join(b.cfg.ConfDir, madeFile)
	long := time.Now().Add(-time.Hour)
	if err := os.Chtimes(file, long, long); err != nil {
		t.Fatal(err)
	}
	if err := b.SetPodCIDR(t.Context(), cidrs); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(file); err != nil || time.Since(info.ModTime()) < 50*time.Minute {
		t.Errorf("the file was written again: %v, %v", info, err)
	}
	for name, template := range map[string]string{
		"syntax": "{{", "unknown field": `{"name":"{{.Node}}"}`, "not JSON": "x", "no plugins": `{"cniVersion":"1.0.0","name":"made"}`,
	} {
		b.write("template", template, 0o644)
		err := b.SetPodCIDR(t.Context(), "10.2.0.0/24")
		if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "template") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.Remove(b.cfg.Template); err != nil {
		t.Fatal(err)
	}
	if err := b.SetPodCIDR(t.Context(), "10.2.0.0/24"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("no template: %v", err)
	}
	if now := b.read("conf/" + madeFile); now != made || b.Ready() != nil {
		t.Errorf("made %s, ready %v", now, b.Ready())
	}
	// A folder that cannot be one stands for one that cannot be written, which root can.
	b.write("template", good, 0o644)
	if err := os.RemoveAll(b.cfg.ConfDir); err != nil {
		t.Fatal(err)
	}
	b.write("conf", "", 0o644)
	if err := b.SetPodCIDR(t.Context(), "10.2.0.0/24"); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "conf") {
		t.Errorf("folder: %v", err)
	}
	if err := os.Remove(b.cfg.ConfDir); err != nil {
		t.Fatal(err)
	}
	if err := b.SetPodCIDR(t.Context(), "10.2.0.0/24"); err != nil { // the folder is made
		t.Error(err)
	}
	entries, err := os.ReadDir(b.cfg.ConfDir)
	if err != nil || len(entries) != 1 || b.Ready() != nil {
		t.Errorf("folder has %v, %v; ready %v", entries, err, b.Ready())
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.MaxConfNum = 0 })
	b.write("conf/20-old.conf", `{"cniVersion":"0.3.1","name":"old","type":"bridge"}`, 0o644)
	b.write("conf/10-new.conflist", `{"cniVersion":"1.0.0","name":"new","plugins":[{"type":"x"},{"type":"y"}]}`, 0o644)
	b.write("conf/README", `not one`, 0o644)
	got, err := load(b.cfg.ConfDir, 0)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, n := range got {
		names = append(names, n.IfName+" "+n.List.Name+" "+n.List.CNIVersion)
	}
	if diff := cmp.Diff([]string{"eth0 new 1.0.0", "eth1 old 0.3.1"}, names); diff != "" {
		t.Errorf("networks (-want +got):\n%s", diff)
	}
	if got, err := load(b.cfg.ConfDir, 1); err != nil || len(got) != 1 {
		t.Errorf("limited: %v, %v", got, err)
	}
	b.write("conf/05-bad.conf", `{"name":"bad","plugins":[]}`, 0o644)
	if _, err := load(b.cfg.ConfDir, 0); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("error %v", err)
	}
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	result := &types100.Result{}
	for _, a := range []string{"fd00::1/64", "10.0.0.1/8", "fd00::2/64", "10.0.0.2/8", "10.0.0.1/8"} {
		ip := &types100.IPConfig{}
		if err := ip.UnmarshalJSON([]byte(fmt.Sprintf(`{"address":%q}`, a))); err != nil {
			t.Fatal(err)
		}
		result.IPs = append(result.IPs, ip)
	}
	for preference, want := range map[string]string{
		"": "10.0.0.1 fd00::1 fd00::2 10.0.0.2", PreferIPv4: "10.0.0.1 fd00::1 fd00::2 10.0.0.2",
		PreferIPv6: "fd00::1 10.0.0.1 fd00::2 10.0.0.2", PreferCNI: "fd00::1 10.0.0.1 fd00::2 10.0.0.2",
	} {
		if got := strings.Join(addresses(result, preference), " "); got != want {
			t.Errorf("%q: %s, want %s", preference, got, want)
		}
	}
	if got := addresses(&types100.Result{}, PreferIPv6); len(got) != 0 {
		t.Errorf("addresses of nothing: %v", got)
	}
}

func TestSandboxIDsThatLeaveTheFolder(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	for _, id := range []string{"", "../x", "a/b"} {
		if _, err := b.attachedFile(id); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%q: error %v", id, err)
		}
	}
}
