// Package tasktest has an OCI runtime for tests that needs neither root nor namespaces: its
// containers are shell scripts that run as plain processes. It is used by tests only.
//
// The process of a container is the file "script" of its bundle, that of an exec the file that
// is its first argument. A file "fail-VERB" in the bundle makes that command of the runtime
// fail with the text in it.
package tasktest

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/go-runc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/reaper"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/crispshim/task"
)

const runtime = `#!/bin/sh
root= log=/dev/null verb= bundle= pidfile= process= image= leave= id= skip=
for a in "$@"; do
	case $skip in
	"") ;;
	ignored) skip=; continue;;
	*) eval "$skip=\$a"; skip=; continue;;
	esac
	case $a in
	--root) skip=root;;
	--log) skip=log;;
	--bundle) skip=bundle;;
	--pid-file) skip=pidfile;;
	--process) skip=process;;
	--image-path) skip=image;;
	--leave-running) leave=1;;
	--log-format|--work-path|--parent-path) skip=ignored;;
	-*) ;;
	*) if [ -z "$verb" ]; then verb=$a; else id=$a; fi;;
	esac
done
state=$root/$id
fail() { echo "{\"level\":\"error\",\"msg\":\"$1\"}" >>"$log"; exit 1; }
[ -n "$bundle" ] || bundle=$(cat "$state/bundle" 2>/dev/null)
[ ! -e "$bundle/fail-$verb" ] || fail "$(cat "$bundle/fail-$verb")"
make() {
	mkdir -p "$root" && mkdir "$state" 2>/dev/null || fail "container with given ID already exists"
	echo "$bundle" >"$state/bundle"
	sh -c "while [ ! -e '$state/go' ]; do sleep 0.01; done; exec sh '$bundle/script'" &
	echo $! >"$state/pid"
	echo $! >"$pidfile"
}
case $verb in
create) make;;
# No command of its own may let it go: while the shell waits for one it would collect the process, too, if that ends at once.
restore) [ -e "$image/dump" ] || fail "no images"; make; : >"$state/go";;
start) touch "$state/go";;
exec)
	[ -e "$state" ] || fail "container does not exist"
	script=$(sed 's/.*"args":\["\([^"]*\)".*/\1/' "$process")
	sh "$script" &
	echo $! >"$pidfile";;
checkpoint) mkdir -p "$image" && touch "$image/dump"; [ -n "$leave" ] || kill -KILL "$(cat "$state/pid")";;
pause) kill -STOP "$(cat "$state/pid")";;
resume) kill -CONT "$(cat "$state/pid")";;
update) cat >"$bundle/resources";;
delete) [ -e "$state" ] && kill -KILL "$(cat "$state/pid")" 2>/dev/null; rm -rf "$state";;
esac
exit 0
`

// theReaper collects the ends of all processes of the test program, which can have one only.
var theReaper = sync.OnceValues(func() (*reaper.Reaper, error) {
	r := reaper.New()
	runc.Monitor = r.Monitor()
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	go r.Run(context.Background(), children) //nolint:forbidigo // as long as the test program
	return r, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
})

// Node is where the containers of a test live.
type Node struct {
	t    testing.TB
	dir  string
	Host task.Host

	mu     sync.Mutex
	events []string
}

// New returns a node.
func New(tb testing.TB) *Node {
	tb.Helper()
	r, err := theReaper()
	if err != nil {
		tb.Fatal(err)
	}
	n := &Node{t: tb, dir: tb.TempDir()}
	n.Host = task.Host{Namespace: "ns", Reaper: r, Publish: n.publish, Log: slog.New(slog.DiscardHandler)}
	if err := os.WriteFile(n.path("runtime"), []byte(runtime), 0o700); err != nil { //nolint:gosec // a program
		tb.Fatal(err)
	}
	return n
}

func (n *Node) path(elem ...string) string { return filepath.Join(append([]string{n.dir}, elem...)...) }

// publish keeps events as the topic, with the exec's id if it is one's.
func (n *Node) publish(topic string, event proto.Message) {
	topic = strings.TrimPrefix(topic, "/tasks/")
	e, ok := event.(interface {
		GetID() string
		GetContainerID() string
	})
	if ok && e.GetID() != "" && e.GetID() != e.GetContainerID() {
		topic += " " + e.GetID()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.events = append(n.events, topic)
}

// Events are the topics so far, with commas between them.
func (n *Node) Events() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return strings.Join(n.events, ",")
}

// Options are those of the runtime.
func (n *Node) Options() *options.Options {
	return &options.Options{BinaryName: n.path("runtime"), Root: n.path("state")}
}

// Bundle makes the bundle of a container with that script.
func (n *Node) Bundle(id, script string) string {
	n.t.Helper()
	if err := os.Mkdir(n.path(id), 0o700); err != nil {
		n.t.Fatal(err)
	}
	n.Write(id, "config.json", `{"process":{},"linux":{"namespaces":[{"type":"pid"}]}}`)
	n.Write(id, "script", script)
	return n.path(id)
}

// Write writes a file in a bundle, or removes it if it is to be empty.
func (n *Node) Write(id, name, text string) string {
	n.t.Helper()
	path := n.path(id, name)
	err := os.WriteFile(path, []byte(text), 0o600)
	if text == "" {
		err = os.Remove(path)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return path
}

// Spec describes a container with that script.
func (n *Node) Spec(id, script string) task.Spec {
	n.t.Helper()
	return task.Spec{ID: id, Bundle: n.Bundle(id, script), Options: n.Options(), Stdout: "file://" + n.path(id, "out")}
}

// Clean fails the test if the runtime still holds a container.
func (n *Node) Clean() {
	n.t.Helper()
	if left, _ := filepath.Glob(n.path("state", "ns", "*")); len(left) > 0 {
		n.t.Errorf("left: %v", left)
	}
}

// Eventually waits until ok.
func (n *Node) Eventually(what string, ok func() bool) {
	n.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for range 12000 {
		if ok() {
			return
		}
		<-tick.C
	}
	n.t.Fatal(fmt.Sprint("never: ", what, "; events ", n.Events()))
}
