package app_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"

	"github.com/crisp-cri/crisp/services/internal/config"
	"github.com/crisp-cri/crisp/services/internal/testkit"
	hubconfig "github.com/crisp-cri/crisp/services/nri-hub/internal/config"
)

// A plugin whose answer cannot be fails the request, which names it and the field, and nothing
// else: it stays, and so do the others.
func TestAnswersThatCannotBe(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{{Name: "20-watcher", ObserveOnly: true}}
	h := startHub(t, cfg)
	g := h.connect()
	answers := map[string]func() (*nri.ContainerAdjustment, []*nri.ContainerUpdate){
		"adjust.mounts[0].destination": func() (*nri.ContainerAdjustment, []*nri.ContainerUpdate) {
			return &nri.ContainerAdjustment{Mounts: []*nri.Mount{{Destination: "data", Source: "/"}}}, nil
		},
		"adjust.mounts[0].source": func() (*nri.ContainerAdjustment, []*nri.ContainerUpdate) {
			return &nri.ContainerAdjustment{Mounts: []*nri.Mount{{Destination: "/data", Source: "/a\x00"}}}, nil
		},
		"adjust.env[0].key": func() (*nri.ContainerAdjustment, []*nri.ContainerUpdate) { return env("", "v"), nil },
		"update[0].container_id": func() (*nri.ContainerAdjustment, []*nri.ContainerUpdate) {
			return nil, []*nri.ContainerUpdate{{ContainerId: strings.Repeat("x", 1<<20)}}
		},
		"UTF-8": func() (*nri.ContainerAdjustment, []*nri.ContainerUpdate) { return env("A", "\xff"), nil },
	}
	var answer func() (*nri.ContainerAdjustment, []*nri.ContainerUpdate)
	create := func(context.Context, *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
		a, u := answer()
		return a, u, nil
	}
	h.mustStart("10", "good", &recorder{})
	p := h.mustStart("20", "watcher", &recorder{onCreate: create})
	g.await(t, "10-good", "20-watcher")
	for field, a := range answers {
		answer = a
		if _, err := g.create(t.Context(), "observed"); err != nil {
			t.Errorf("%s of a plugin that only observes: %v", field, err)
		}
	}
	p.stub.Stop()
	g.await(t, "10-good")

	h.mustStart("20", "bad", &recorder{
		onCreate: create,
		onStop: func(context.Context, *nri.Container) ([]*nri.ContainerUpdate, error) {
			return []*nri.ContainerUpdate{{}}, nil
		},
	})
	g.await(t, "10-good", "20-bad")
	for field, a := range answers {
		answer = a
		_, err := g.create(t.Context(), "c1")
		if !errdefs.IsAborted(err) || !strings.Contains(err.Error(), "20-bad") || !strings.Contains(err.Error(), field) || len(err.Error()) > 1000 {
			t.Errorf("%s: error is %v", field, err)
		}
	}
	// What cannot fail goes on without the answer.
	if resp, err := g.stopContainer(t.Context(), "c1"); err != nil || len(resp.GetUpdate()) > 0 {
		t.Errorf("stop: %v, %v", resp, err)
	}
	g.await(t, "10-good", "20-bad")
}

// Wishes of a plugin's own that cannot be come back as failed, and the others are passed on.
func TestWishesThatCannotBe(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	p := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	failed, err := p.stub.UpdateContainers([]*nri.ContainerUpdate{
		{}, {ContainerId: "c1"}, {ContainerId: "c2", Linux: &nri.LinuxContainerUpdate{Resources: &nri.LinuxResources{Unified: map[string]string{"a\x00": "b"}}}},
	})
	if err != nil || len(failed) != 2 || failed[0].GetContainerId() != "" || failed[1].GetContainerId() != "c2" {
		t.Errorf("failed are %v, error is %v", failed, err)
	}
	if w := g.wanted(); len(w) != 1 || len(w[0].GetUpdates()) != 1 || w[0].GetUpdates()[0].GetContainerId() != "c1" {
		t.Errorf("the gateway got %v", w)
	}
}

// An answer that is no message of the protocol disconnects its plugin, and the request goes on.
func TestAnswerThatIsNoMessage(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	h.mustStart("10", "good", &recorder{})
	p := h.raw(t, map[string]ttrpc.Method{
		"Configure": method(func(*nri.ConfigureRequest) (proto.Message, error) {
			return &nri.ConfigureResponse{Events: int32(nri.MustParseEventMask("CreateContainer"))}, nil
		}),
		"Synchronize": method(func(*nri.SynchronizeRequest) (proto.Message, error) { return &nri.SynchronizeResponse{}, nil }),
		"CreateContainer": method(func(*nri.CreateContainerRequest) (proto.Message, error) {
			// Field 1, the adjustment, with a field 9, an argument, of invalid text.
			resp := &nri.CreateContainerResponse{}
			resp.ProtoReflect().SetUnknown([]byte{0x0a, 3, 0x4a, 1, 0xff})
			return resp, nil
		}),
	})
	if _, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: "bad", PluginIdx: "20"}); err != nil {
		t.Fatal(err)
	}
	g.await(t, "10-good", "20-bad")
	if _, err := g.create(t.Context(), "c1"); err != nil {
		t.Error(err)
	}
	select {
	case <-p.closed:
	case <-time.After(patience):
		t.Error("still connected")
	}
	g.await(t, "10-good")
}

// A refused registration is refused for good: a success would leave its plugin waiting for a
// Configure that does not come.
func TestRegistrationAfterARefusal(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	p := h.raw(t, nil)
	for i, idx := range []string{"100", "10"} {
		_, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: "p", PluginIdx: idx})
		if err == nil || i == 1 && !strings.Contains(err.Error(), "100") && !errors.Is(err, ttrpc.ErrClosed) {
			t.Errorf("registration with index %s: %v", idx, err)
		}
	}
	select {
	case <-p.closed:
	case <-time.After(patience):
		t.Error("still connected")
	}
	g.await(t)
}

// What a plugin says of itself is bounded: it is logged, remembered and sent to gateways.
func TestNamesAreBounded(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	long := strings.Repeat("n", 1<<20)
	for _, req := range []*nri.RegisterPluginRequest{
		{PluginName: long, PluginIdx: "10"}, {PluginName: "p", PluginIdx: long}, {PluginName: "p", PluginIdx: "10", NRIVersion: long},
	} {
		if _, err := h.raw(t, nil).runtime.RegisterPlugin(t.Context(), req); err == nil || len(err.Error()) > 1000 {
			t.Errorf("error is %.300v", err)
		}
	}
	h.mustStart("10", strings.Repeat("n", 253), &recorder{})
	g.await(t, "10-"+strings.Repeat("n", 253))
}

// Connections that never register are limited in number, and their end makes room.
func TestUnregisteredConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	var silent []net.Conn
	closed := func(c net.Conn) bool {
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err := c.Read(make([]byte, 1))
		return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
	}
	for refused := false; !refused; {
		c, err := net.Dial("unix", h.cfg.NRI.Socket.Path)
		if err != nil {
			t.Fatal(err)
		}
		silent = append(silent, c)
		if len(silent) > 1000 {
			t.Fatal("there is no limit")
		}
		refused = len(silent) > 200 && closed(c)
	}
	for _, c := range silent {
		_ = c.Close()
	}
	testkit.Eventually(t, patience, func() error { return h.start("10", "p", &recorder{}) })
	g.await(t, "10-p")
}

// A plugin that does not answer Configure is disconnected, and one that is being synchronised
// does not keep the hub from ending.
func TestPluginsThatHangWhileTheyJoin(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Timeouts.Request = config.Duration(500 * time.Millisecond)
	h := startHub(t, cfg)
	g := h.connect()
	release := make(chan struct{})
	p := h.raw(t, map[string]ttrpc.Method{
		"Configure": method(func(*nri.ConfigureRequest) (proto.Message, error) {
			<-release
			return &nri.ConfigureResponse{}, nil
		}),
	})
	if _, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: "p", PluginIdx: "10"}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.closed:
	case <-time.After(patience):
		t.Error("still connected")
	}
	g.await(t)
	begun := make(chan struct{})
	h.mustStart("20", "slow", &recorder{onSync: func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
		close(begun)
		<-release
		return nil, nil
	}})
	<-begun
	h.stop()
	close(release)
	again := startHub(t, cfg)
	g = again.connect()
	again.mustStart("20", "slow", &recorder{})
	g.await(t, "20-slow")
}

// Rights hold for evictions that a plugin asks for by itself.
func TestRightsToEvict(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Plugins = []hubconfig.Plugin{{Name: "p", Rights: hubconfig.Rights{Pods: hubconfig.Pods{Namespaces: []string{"mine"}}}}}
	h := startHub(t, cfg)
	mine, theirs := container("mine"), container("theirs")
	mine.PodSandboxId, theirs.PodSandboxId = "pm", "pt"
	g := h.connect(func(g *fakeGateway) {
		g.pods = []*nri.PodSandbox{podIn("mine", "pm", nil), podIn("theirs", "pt", nil)}
		g.containers = []*nri.Container{mine, theirs}
	})
	p := h.raw(t, map[string]ttrpc.Method{
		"Configure":   method(func(*nri.ConfigureRequest) (proto.Message, error) { return &nri.ConfigureResponse{}, nil }),
		"Synchronize": method(func(*nri.SynchronizeRequest) (proto.Message, error) { return &nri.SynchronizeResponse{}, nil }),
	})
	if _, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: "p", PluginIdx: "10"}); err != nil {
		t.Fatal(err)
	}
	g.await(t, "10-p")
	if _, err := p.runtime.UpdateContainers(t.Context(), &nri.UpdateContainersRequest{Evict: []*nri.ContainerEviction{
		{ContainerId: "theirs"}, {ContainerId: "mine"}, {ContainerId: "unknown"}, {},
	}}); err != nil {
		t.Error(err)
	}
	if w := g.wanted(); len(w) != 1 || len(w[0].GetEvictions()) != 1 || w[0].GetEvictions()[0].GetContainerId() != "mine" {
		t.Errorf("the gateway was asked for %v", w)
	}
}

// A second registration on a connection changes nothing.
func TestRegistrationTwice(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	p := h.raw(t, map[string]ttrpc.Method{
		"Configure":   method(func(*nri.ConfigureRequest) (proto.Message, error) { return &nri.ConfigureResponse{}, nil }),
		"Synchronize": method(func(*nri.SynchronizeRequest) (proto.Message, error) { return &nri.SynchronizeResponse{}, nil }),
	})
	register := func(name string) error {
		_, err := p.runtime.RegisterPlugin(t.Context(), &nri.RegisterPluginRequest{PluginName: name, PluginIdx: "10"})
		return err
	}
	if err := register("p"); err != nil {
		t.Fatal(err)
	}
	g.await(t, "10-p")
	for _, name := range []string{"p", "other"} {
		if err := register(name); err == nil || !strings.Contains(err.Error(), "10-p") {
			t.Errorf("second registration as %q: %v", name, err)
		}
	}
	g.await(t, "10-p")
}

// Plugins that end, or fail, on their way into the hub leave nothing behind, and can come again.
func TestPluginsThatFailWhileTheyJoin(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	g := h.connect()
	var conn net.Conn
	for name, r := range map[string]*recorder{
		"refuses Configure": {onConfigure: func(string, string, string) (stub.EventMask, error) { return 0, errors.New("not today") }},
		"fails Synchronize": {onSync: func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
			return nil, errors.New("not today")
		}},
		"ends in Synchronize": {onSync: func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
			return nil, conn.Close()
		}},
		"closes one half in Synchronize": {onSync: func(context.Context, []*nri.PodSandbox, []*nri.Container) ([]*nri.ContainerUpdate, error) {
			u, _ := conn.(*net.UnixConn)
			return nil, u.CloseWrite()
		}},
	} {
		closed := make(chan struct{})
		if h.start("10", "p", r, h.tapped(&conn), stub.WithOnClose(func() { close(closed) })) == nil {
			select {
			case <-closed:
			case <-time.After(patience):
				t.Errorf("%s: still connected", name)
			}
		}
		if err := g.run(t.Context(), "p-"+strings.ReplaceAll(name, " ", "-")); err != nil {
			t.Errorf("%s: pod beside it: %v", name, err)
		}
		g.await(t)
		if names := g.active(t.Context()); slices.Contains(names, "10-p") {
			t.Errorf("%s: is there", name)
		}
	}
	p := h.mustStart("10", "p", &recorder{})
	g.await(t, "10-p")
	if err := g.run(t.Context(), "last"); err != nil || p.count("run last") != 1 {
		t.Errorf("%v, seen %v", err, p.seen())
	}
}

// A socket whose file is gone is made again, and one that another serves is left to it; plugins
// that are connected notice nothing.
func TestSocketThatIsTakenAway(t *testing.T) {
	t.Parallel()
	h := startHub(t, testConfig(t))
	path := h.cfg.NRI.Socket.Path
	g := h.connect()
	h.mustStart("10", "first", &recorder{})
	g.await(t, "10-first")
	awaitStart := func(index, name string) {
		t.Helper()
		testkit.Eventually(t, patience, func() error { return h.start(index, name, &recorder{}) })
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	awaitStart("20", "second")
	g.await(t, "10-first", "20-second")

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	var thief net.Listener
	testkit.Eventually(t, patience, func() (err error) {
		// The hub may be quicker.
		_ = os.Remove(path)
		thief, err = net.Listen("unix", path)
		return err
	})
	if err := g.run(t.Context(), "p1"); err != nil {
		t.Error(err)
	}
	if err := thief.Close(); err != nil {
		t.Fatal(err)
	}
	awaitStart("30", "third")
	g.await(t, "10-first", "20-second", "30-third")

	// The folder goes, too.
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	awaitStart("40", "fourth")
	g.await(t, "10-first", "20-second", "30-third", "40-fourth")
}
