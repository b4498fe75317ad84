package inspect

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/bbolt" //nolint:depguard // makes what the image library makes
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/config"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/inspect/rules"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

var (
	podID  = strings.Repeat("a", 64)
	taskID = strings.Repeat("b", 64)
)

// tree makes the folders of a sandboxd that has nothing but the named files, which are
// below its root (lib) or state (run).
func tree(t *testing.T, files map[string]string) config.Config {
	t.Helper()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.Root, cfg.State, cfg.Network.ConfDir = filepath.Join(dir, "lib"), filepath.Join(dir, "run"), filepath.Join(dir, "net.d")
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(content, "DIR", dir)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cfg
}

// records opens the tree's database as a running sandboxd has it, with these objects.
func records(t *testing.T, cfg config.Config, sandboxes []*recordv1.Sandbox, containers []*recordv1.Container) {
	t.Helper()
	s, err := store.Open(filepath.Join(cfg.Root, "records.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	err = s.Update(t.Context(), func(tx *store.Tx) error {
		for _, r := range sandboxes {
			if err := tx.PutSandbox(r); err != nil {
				return err
			}
		}
		for _, r := range containers {
			if err := tx.PutContainer(r); err != nil {
				return err
			}
		}
		return tx.AppendEvent(&recordv1.Event{Topic: "no-slash", MessageId: "1"})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestLookReadsTheFolders(t *testing.T) {
	cfg := tree(t, map[string]string{
		"run/shims/" + podID + "/bootstrap.json":              `{"version":3,"address":"unix://DIR/run/s/used","protocol":"ttrpc"}`,
		"run/shims/" + podID + "/containers/" + taskID + "/x": "",
		"run/shims/.new-1/x":                                  "",
		"run/shims/" + podID + "/containers/.old-2/x":         "",
		"run/ns/" + podID + "/x":                              "",
		"run/io/" + taskID + "/x":                             "",
		"run/sandboxes/" + podID + "/x":                       "",
		"lib/sandboxes/" + podID + "/hosts":                   "",
		"lib/containers/" + taskID + "/x":                     "",
		"lib/network/attached/" + podID + ".json":             "",
		"lib/network/results/results/net-" + podID + "-eth0":  "",
		"net.d/10-a.conflist":                                 `{"name":"net","plugins":[{"type":"bridge","ipam":{"type":"host-local","dataDir":"DIR/addresses"}},{"type":"x"}]}`,
		"net.d/20-b.conf":                                     "not JSON",
		"addresses/net/10.0.0.2":                              podID + "\r\neth0",
		"addresses/net/last_reserved_ip.0":                    "10.0.0.2",
		"addresses/unused/10.0.0.3":                           podID,
	})
	records(t, cfg, nil, nil)
	var l net.ListenConfig
	if err := os.MkdirAll(filepath.Join(cfg.State, "s"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"used", "stray"} {
		lis, err := l.Listen(t.Context(), "unix", filepath.Join(cfg.State, "s", name))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = lis.Close() }()
	}
	layers(t, cfg)

	got, err := Look(t.Context(), cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !got.Pids[os.Getpid()] {
		t.Error("the own process is not listed")
	}
	slices.Sort(got.Rests)
	got.Boot, got.Pids = "", nil
	want := rules.Machine{
		Root: cfg.Root, State: cfg.State, Running: true,
		Bundles: map[string][]string{podID: {taskID}},
		Rests: []string{
			filepath.Join(cfg.State, "s", "stray"), filepath.Join(cfg.State, "shims", ".new-1"),
			filepath.Join(cfg.State, "shims", podID, "containers", ".old-2"),
		},
		Shims: map[string][]int{}, Pins: []string{podID}, Cgroups: map[string][]string{},
		Layers: []string{taskID}, Layered: true, FIFOs: []string{taskID}, Folders: []string{taskID},
		PodFiles: []string{podID}, Attached: []string{podID},
		Addresses: map[string]string{filepath.Join(filepath.Dir(cfg.Root), "addresses", "net", "10.0.0.2"): podID},
	}
	slices.Sort(want.Rests)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("machine (-want +got):\n%s", diff)
	}
}

// layers makes the image library's database with a layer of a container and one of an image.
func layers(t *testing.T, cfg config.Config) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(cfg.Root, "images"), 0o700); err != nil {
		t.Fatal(err)
	}
	db, err := bbolt.Open(filepath.Join(cfg.Root, "images", "meta.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	err = db.Update(func(tx *bbolt.Tx) error {
		for key, label := range map[string]string{taskID: "crisp/container", "sha256:1": "other"} {
			b, err := tx.CreateBucketIfNotExists([]byte("v1"))
			for _, name := range []string{"k8s.io", "snapshots", "overlayfs", key, "labels"} {
				if err != nil {
					return err
				}
				b, err = b.CreateBucketIfNotExists([]byte(name))
			}
			if err != nil {
				return err
			}
			if err := b.Put([]byte(label), []byte("true")); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestGroupParents(t *testing.T) {
	rec := rules.Records{Snapshot: store.Snapshot{
		Sandboxes: []*recordv1.Sandbox{{Config: &criv1.PodSandboxConfig{
			Linux: &criv1.LinuxPodSandboxConfig{CgroupParent: "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice"},
		}}},
		Containers: []*recordv1.Container{{CgroupsPath: "/own/pod/" + taskID}, {CgroupsPath: "other-x.slice:crisp:" + taskID}, {CgroupsPath: "/" + taskID}},
	}}
	want := []string{"/crisp", "/kubepods", "/kubepods.slice", "/other.slice", "/own/pod", "/system.slice"}
	if diff := cmp.Diff(want, groupParents(rec)); diff != "" {
		t.Errorf("parents (-want +got):\n%s", diff)
	}
}

func TestGroupsAreFoundByTheirName(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{podID, "crisp-" + taskID + ".scope/inner", "burstable/pod1/" + taskID, "docker-" + podID + ".scope"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	m := machine{Cgroups: map[string][]string{}}
	if err := m.walkGroups(dir); err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{
		podID:  {filepath.Join(dir, podID)},
		taskID: {filepath.Join(dir, "burstable/pod1", taskID), filepath.Join(dir, "crisp-"+taskID+".scope")},
	}
	if diff := cmp.Diff(want, m.Cgroups); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
}

func TestCheckStateReportsWhatLasts(t *testing.T) {
	cfg := tree(t, map[string]string{"lib/containers/" + taskID + "/x": ""})
	records(t, cfg, nil, nil) // with one bad event
	file := configFile(t, cfg)
	var out bytes.Buffer
	err := checkState(t.Context(), []string{"--config", file, "--wait", "300ms", "--json"}, &out, &out, nil)
	if ExitCode(err) != 1 {
		t.Errorf("exit code %d for %v, want 1", ExitCode(err), err)
	}
	var got struct{ Findings []rules.Finding }
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v in %s", err, out.String())
	}
	want := []rules.Finding{
		{Rule: "orphan.folder", ID: taskID, Text: "folder without a record"},
		{Rule: "outbox.event", ID: "entry 1", Text: `message id "1", topic "no-slash"`},
	}
	if diff := cmp.Diff(want, got.Findings); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
}

func TestCheckStateWithoutRecordsIsAnError(t *testing.T) {
	file := configFile(t, tree(t, nil))
	for name, args := range map[string][]string{"no records": {"--config", file}, "bad flag": {"--nonsense"}} {
		var out bytes.Buffer
		err := checkState(t.Context(), args, &out, &out, nil)
		if ExitCode(err) != 2 {
			t.Errorf("%s: exit code %d for %v, want 2", name, ExitCode(err), err)
		}
	}
}

func configFile(t *testing.T, cfg config.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "sandboxd.toml")
	text := "version = 1\nroot = \"" + cfg.Root + "\"\nstate = \"" + cfg.State + "\"\n[network]\nconf_dir = \"" + cfg.Network.ConfDir + "\"\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPodsWithTheirShims(t *testing.T) {
	cfg := tree(t, map[string]string{
		"run/shims/" + podID + "/bootstrap.json": `{"version":3,"address":"unix://DIR/shim.sock","protocol":"ttrpc"}`,
	})
	meta := &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: "web", Namespace: "shop"}}
	records(t, cfg, []*recordv1.Sandbox{
		{Id: taskID, State: recordv1.SandboxState_SANDBOX_STATE_STOPPED, CreatedAt: timestamppb.Now(), Config: meta},
		{Id: podID, State: recordv1.SandboxState_SANDBOX_STATE_READY, Config: meta},
	}, []*recordv1.Container{{
		Id: taskID, SandboxId: podID, State: recordv1.ContainerState_CONTAINER_STATE_RUNNING, Pid: 7,
		Config: &criv1.ContainerConfig{Metadata: &criv1.ContainerMetadata{Name: "main"}},
	}})
	var l net.ListenConfig
	lis, err := l.Listen(t.Context(), "unix", filepath.Join(filepath.Dir(cfg.Root), "shim.sock"))
	if err != nil {
		t.Fatal(err)
	}
	want := []Pod{
		{
			ID: podID, Name: "web", Namespace: "shop", State: "READY", Shim: Shim{Connection: "open"},
			Containers: []Container{{ID: taskID, Name: "main", State: "RUNNING", Pid: 7}},
		},
		{ID: taskID, Name: "web", Namespace: "shop", State: "STOPPED", Shim: Shim{Connection: "none"}, Containers: []Container{}},
	}
	got, err := Pods(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
	if err := lis.Close(); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := ps(t.Context(), []string{"--config", configFile(t, cfg)}, &out, &out); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); !strings.Contains(text, "refused") || !strings.Contains(text, "  main") {
		t.Errorf("output is\n%s", text)
	}
}

func TestMemoryOfAProcess(t *testing.T) {
	dir := t.TempDir()
	text := "00400000-7ff [rollup]\nRss:                2048 kB\nPss:                1024 kB\nShared_Clean:       1 kB\n"
	if err := os.WriteFile(filepath.Join(dir, "smaps_rollup"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	rss, pss := memory(dir)
	if rss != 2<<20 || pss != 1<<20 {
		t.Errorf("rss %d, pss %d", rss, pss)
	}
	if rss, pss := memory(filepath.Join(dir, "ended")); rss != 0 || pss != 0 {
		t.Errorf("of an ended process: rss %d, pss %d", rss, pss)
	}
}
