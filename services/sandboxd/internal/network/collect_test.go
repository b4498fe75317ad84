package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

func (b *bench) exists(name string) bool {
	_, err := os.Stat(filepath.Join(b.dir, name))
	return err == nil
}

// requestOf is a request for a pod with an id of that character, without host ports.
func requestOf(c string) pod.NetworkRequest {
	req := request()
	req.SandboxID = strings.Repeat(c, 64)
	req.Config.PortMappings = nil
	return req
}

func (b *bench) attach(req pod.NetworkRequest) []byte {
	b.t.Helper()
	result, err := b.Attach(b.t.Context(), req)
	if err != nil {
		b.t.Fatal(err)
	}
	return result.Raw
}

// valid are the attachments that a plugin was last told of.
func (b *bench) valid(plugin string) []string {
	b.t.Helper()
	var conf struct {
		Valid []struct {
			ContainerID string `json:"containerID"`
			IfName      string `json:"ifname"`
		} `json:"cni.dev/valid-attachments"`
	}
	if err := json.Unmarshal([]byte(b.read("stdin.GC."+plugin)), &conf); err != nil {
		b.t.Fatal(err)
	}
	out := []string{}
	for _, v := range conf.Valid {
		out = append(out, v.ContainerID[:1]+" "+v.IfName)
	}
	return out
}

func holders(list ...pod.NetworkHolder) func() []pod.NetworkHolder {
	return func() []pod.NetworkHolder { return list }
}

func TestCollectTellsWhoIsValid(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.MaxConfNum = 0; c.CollectInterval = time.Hour })
	b.plugin("one", gives)
	b.plugin("two", gives)
	b.list11("10-one.conflist", "", "one")
	b.list11("20-two.conflist", "", "two")
	raw := b.attach(requestOf("a"))
	// The order of the networks changes: who is attached keeps the interface that it has.
	b.list11("05-two.conflist", "", "two")
	b.put("05-two.conflist", strings.Replace(b.read("conf/20-two.conflist"), "05-two", "20-two", 1))
	if err := os.Remove(filepath.Join(b.dir, "conf/20-two.conflist")); err != nil {
		t.Fatal(err)
	}
	b.reload()
	b.attach(requestOf("b"))
	held := holders(
		pod.NetworkHolder{SandboxID: strings.Repeat("a", 64), Raw: raw},
		pod.NetworkHolder{SandboxID: strings.Repeat("b", 64)}, // half made
		pod.NetworkHolder{SandboxID: strings.Repeat("c", 64)}, // all that is known is that it may be attached
		pod.NetworkHolder{SandboxID: strings.Repeat("d", 64), Raw: []byte("{")},
	)
	if err := b.collect(t.Context(), held); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a eth0", "b eth1", "c eth1", "d eth1"}, b.valid("one")); diff != "" {
		t.Errorf("valid (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a eth1", "b eth0", "c eth0", "d eth0"}, b.valid("two")); diff != "" {
		t.Errorf("valid (-want +got):\n%s", diff)
	}
	for _, call := range b.calls() {
		if strings.HasPrefix(call, "DEL") {
			t.Errorf("%s of a valid attachment", call)
		}
	}
}

// An empty list is told as one: a plugin that gets none may not release anything.
func TestCollectWithoutPods(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("one", gives)
	b.list11("10-one.conflist", "", "one")
	if err := b.collect(t.Context(), holders()); err != nil {
		t.Fatal(err)
	}
	if stdin := b.read("stdin.GC.one"); !strings.Contains(stdin, `"cni.dev/valid-attachments":[]`) {
		t.Errorf("told %s", stdin)
	}
}

func TestCollectRespectsVersionAndConfiguration(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(b *bench){
		"disabled":    func(b *bench) { b.list11("10-a.conflist", `,"disableGC":true`, "one") },
		"old version": func(b *bench) { b.list("10-a.conflist", "one") },
		"no network":  func(*bench) {},
		"unknown to it": func(b *bench) {
			b.plugin("one", `echo '{"cniVersion":"1.1.0","code":4,"msg":"unknown CNI_COMMAND: GC"}'; exit 1`)
			b.list11("10-a.conflist", "", "one")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, nil)
			b.plugin("one", gives)
			set(b)
			if err := b.collect(t.Context(), holders()); err != nil {
				t.Error(err)
			}
			if name != "unknown to it" && len(b.calls()) != 0 {
				t.Errorf("calls %v", b.calls())
			}
		})
	}
	b := newBench(t, nil)
	b.plugin("one", `echo '{"cniVersion":"1.1.0","code":4,"msg":"unknown CNI_COMMAND: GC"}'; exit 1`)
	b.plugin("two", fails)
	b.list11("10-a.conflist", "", "one", "two")
	if err := b.collect(t.Context(), holders()); err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("the error of the second plugin is lost: %v", err)
	}
}

// What was attached and has no pod any more is detached as it was attached, with what is
// remembered alone.
func TestCollectDetachesOrphans(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("good", gives)
	b.list("10-a.conflist", "good") // with the capability portMappings
	raw := b.attach(requestOf("a"))
	orphan := requestOf("b")
	orphan.Config.PortMappings = []*criv1.PortMapping{{HostPort: 8081, ContainerPort: 80}}
	b.attach(orphan)
	// It needs no configuration either.
	if err := os.Remove(filepath.Join(b.dir, "conf/10-a.conflist")); err != nil {
		t.Fatal(err)
	}
	b.reload()
	b.CNI = New(t.Context(), b.cfg, b.log, b.tracer)
	held := holders(pod.NetworkHolder{SandboxID: strings.Repeat("a", 64), Raw: raw})
	for range 2 {
		if err := b.collect(t.Context(), held); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"ADD good eth0 netns=/no/such/netns", "ADD good eth0 netns=/no/such/netns", "DEL good eth0 netns="}
	if diff := cmp.Diff(want, b.calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if stdin := b.read("stdin.DEL.good"); !strings.Contains(stdin, `"hostPort":8081`) {
		t.Errorf("DEL was not given the port: %s", stdin)
	}
	if env := b.read("env.DEL.good"); !strings.Contains(env, "K8S_POD_NAME=web;") || !strings.Contains(env, "CNI_CONTAINERID="+orphan.SandboxID) {
		t.Errorf("DEL's environment: %s", env)
	}
	if n := b.remembered(); n != 1 {
		t.Errorf("%d attachments remembered, want 1", n)
	}
}

// Nothing is collected while a pod is being attached, and nothing is attached while
// something is collected; neither holds up the other for good.
func TestCollectIsAlone(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Timeout = 8 * time.Second })
	b.plugin("one", `case $CNI_COMMAND in
		ADD) touch `+b.dir+`/adding; while [ -e `+b.dir+`/hold ]; do sleep 0.05; done; rm `+b.dir+`/adding;;
		GC) [ ! -e `+b.dir+`/adding ] || touch `+b.dir+`/both; touch `+b.dir+`/collecting; sleep 100;;
	esac; `+gives)
	b.list11("10-a.conflist", "", "one")
	b.write("hold", "", 0o644)
	added := make(chan error, 1)
	go func() { _, err := b.Attach(t.Context(), requestOf("a")); added <- err }()
	b.eventually("adding", func() bool { return b.exists("adding") })
	collected := make(chan error, 1)
	go func() {
		collected <- b.collect(t.Context(), holders(pod.NetworkHolder{SandboxID: strings.Repeat("a", 64)}, pod.NetworkHolder{SandboxID: strings.Repeat("b", 64)}))
	}()
	if err := os.Remove(filepath.Join(b.dir, "hold")); err != nil {
		t.Fatal(err)
	}
	if err := <-added; err != nil {
		t.Fatal(err)
	}
	b.eventually("collecting", func() bool { return b.exists("collecting") })
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	req := requestOf("b")
	if _, err := b.Attach(ctx, req); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "garbage collection") {
		t.Errorf("attached beside a collection: %v", err)
	}
	// The collection is given up in time, and the pod comes then.
	if _, err := b.Attach(t.Context(), req); err != nil {
		t.Error(err)
	}
	if err := <-collected; err == nil || !strings.Contains(err.Error(), "no answer in time") {
		t.Errorf("collection: %v", err)
	}
	if b.exists("both") {
		t.Error("ADD and GC ran at the same time")
	}
}

func TestCollectRunsAfterChanges(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.CollectInterval = time.Hour })
	b.plugin("one", gives)
	b.plugin("two", gives)
	b.list11("10-a.conflist", "", "one")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); b.Collect(ctx, holders()) }()
	b.eventually("at the start", func() bool { return b.exists("stdin.GC.one") })
	b.list11("10-a.conflist", "", "two")
	b.eventually("after a change", func() bool { return b.exists("stdin.GC.two") })
	cancel()
	<-done
	if want := []string{"GC one  netns=", "GC two  netns="}; fmt.Sprint(b.calls()) != fmt.Sprint(want) {
		t.Errorf("calls %q, want %q", b.calls(), want)
	}
	off := newBench(t, nil)
	off.list11("10-a.conflist", "", "one")
	off.Collect(t.Context(), holders()) // returns
}
