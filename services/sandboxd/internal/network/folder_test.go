package network

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
)

// own makes a folder with a network of a plugin of the same name.
func (b *bench) own(name string) Folder {
	b.t.Helper()
	dir := filepath.Join(b.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	b.plugin(name, gives)
	b.write(name+"/10-"+name+".conflist", `{"cniVersion":"1.1.0","name":"`+name+`","plugins":[{"type":"`+name+`"}]}`, 0o644)
	return Folder{ConfDir: dir, MaxConfNum: 1}
}

func of(c, handler string) pod.NetworkRequest {
	req := requestOf(c)
	req.Handler = handler
	return req
}

// Pods of a handler with a folder of its own get the networks of that folder, and give back what
// they were attached with whatever the handler's folder is by then.
func TestFoldersOfHandlers(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.CollectInterval = time.Hour })
	b.plugin("node", gives)
	b.list11("10-node.conflist", "", "node")
	b.Configure(Handlers{ByName: map[string]Folder{"vm": b.own("vm")}, Default: "runc"})
	rawA, rawB := b.attach(of("a", "vm")), b.attach(of("b", "runc"))
	if err := b.collect(t.Context(), holders(
		pod.NetworkHolder{SandboxID: strings.Repeat("a", 64), Raw: rawA}, pod.NetworkHolder{SandboxID: strings.Repeat("b", 64), Raw: rawB},
	)); err != nil {
		t.Fatal(err)
	}
	if vm, node := b.valid("vm"), b.valid("node"); !slices.Equal(vm, []string{"a eth0"}) || !slices.Equal(node, []string{"b eth0"}) {
		t.Errorf("told as valid: %v and %v", vm, node)
	}
	b.Configure(Handlers{ByName: map[string]Folder{"vm": b.own("other"), "runc": b.own("further")}, Default: "runc"})
	if err := os.RemoveAll(filepath.Join(b.dir, "vm")); err != nil {
		t.Fatal(err)
	}
	b.attach(of("c", "vm"))
	for _, d := range []struct {
		req pod.NetworkRequest
		raw []byte
	}{{of("a", "vm"), nil}, {of("b", "runc"), rawB}, {of("c", "vm"), nil}, {of("d", "runc"), nil}} {
		if err := b.Detach(t.Context(), d.req, d.raw); err != nil {
			t.Error(err)
		}
	}
	var got []string
	for _, call := range b.calls() {
		if command, rest, _ := strings.Cut(call, " "); command == "ADD" || command == "DEL" {
			name, _, _ := strings.Cut(rest, " ")
			got = append(got, command+" "+name)
		}
	}
	want := []string{"ADD vm", "ADD node", "ADD other", "DEL vm", "DEL node", "DEL other", "DEL further"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

// The node is ready or not by the networks of the default handler; pods of another one without
// networks fail with the name of its folder.
func TestReadyByTheDefaultHandler(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	empty := Folder{ConfDir: filepath.Join(b.dir, "empty"), MaxConfNum: 1}
	handlers := Handlers{ByName: map[string]Folder{"vm": empty}, Default: "runc"}
	b.plugin("node", gives)
	b.list("10-node.conflist", "node")
	b.Configure(handlers)
	if err := b.Ready(); err != nil {
		t.Errorf("by a handler that is not the default one: %v", err)
	}
	if b.pause() != recheckFailed {
		t.Error("a handler without networks is not looked at again soon")
	}
	if _, err := b.Attach(t.Context(), of("a", "vm")); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), empty.ConfDir) {
		t.Errorf("attach: %v", err)
	}
	handlers.Default = "vm"
	b.Configure(handlers)
	if err := b.Ready(); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), empty.ConfDir) {
		t.Errorf("ready: %v", err)
	}
}

// The folders of handlers are watched as the node's is, also those that come later.
func TestFoldersOfHandlersAreWatched(t *testing.T) {
	t.Parallel()
	b := newBench(t, nil)
	b.plugin("node", gives)
	b.list("10-node.conflist", "node")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- b.Run(ctx, func() {}) }()
	late := Folder{ConfDir: filepath.Join(b.dir, "late"), MaxConfNum: 1}
	b.Configure(Handlers{ByName: map[string]Folder{"vm": late}, Default: "vm"})
	if b.Ready() == nil {
		t.Error("a folder that is not there is ready")
	}
	b.own("late")
	b.eventually("the folder of the handler is read, its plugin asked", func() bool { return b.Ready() == nil })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
