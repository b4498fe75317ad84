package rules

import (
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/store"
)

const boot = "boot-1"

var (
	podID  = strings.Repeat("a", 64)
	taskID = strings.Repeat("b", 64)
	other  = strings.Repeat("c", 64)
)

func at(second int64) *timestamppb.Timestamp { return timestamppb.New(time.Unix(second, 0)) }

// world is a consistent pair of records and machine: a pod with one running container.
func world(t *testing.T) (Records, Machine) {
	t.Helper()
	netns := "/run/x/ns/" + podID + "/net"
	envelope, err := proto.Marshal(&types.Envelope{Topic: "/tasks/exit", Event: &anypb.Any{TypeUrl: "x"}})
	if err != nil {
		t.Fatal(err)
	}
	rec := Records{
		Snapshot: store.Snapshot{
			Sandboxes: []*recordv1.Sandbox{{
				Id: podID, State: ready, CreatedAt: at(1), BootId: boot, NetnsPath: netns, NetworkAttached: true, Ips: []string{"10.0.0.2"},
				Namespaces: map[string]string{"network": netns},
				Config:     &criv1.PodSandboxConfig{Metadata: &criv1.PodSandboxMetadata{Name: "p", Namespace: "n", Uid: "u"}},
			}},
			Containers: []*recordv1.Container{{
				Id: taskID, SandboxId: podID, State: running, CreatedAt: at(2), StartedAt: at(3), BootId: boot, Pid: 42,
				ImageId: "sha256:1", Snapshotter: "overlayfs", Spec: []byte("{}"), CgroupsPath: "/pods/" + taskID,
				Config: &criv1.ContainerConfig{Metadata: &criv1.ContainerMetadata{Name: "c"}},
			}},
		},
		Events: []store.Entry{{Sequence: 1, Event: &recordv1.Event{Topic: "/tasks/exit", MessageId: "m", Envelope: envelope}}},
	}
	m := Machine{
		Root: "/lib/x", State: "/run/x", Boot: boot, Running: true,
		Bundles: map[string][]string{podID: {taskID}}, Shims: map[string][]int{podID: {41}}, Pids: map[int]bool{41: true, 42: true},
		Mounts: []string{netns, "/run/x/sandboxes/" + podID + "/shm", "/run/x/shims/" + podID + "/containers/" + taskID + "/rootfs"},
		Pins:   []string{podID}, Cgroups: map[string][]string{taskID: {"/sys/fs/cgroup/pods/" + taskID}},
		Layers: []string{taskID}, Layered: true, FIFOs: []string{taskID}, Folders: []string{taskID}, PodFiles: []string{podID},
		Attached: []string{podID}, Addresses: map[string]string{"/net/10.0.0.2": podID},
	}
	return rec, m
}

// end makes the world's container one that has ended to the last step.
func end(rec *Records, m *Machine) *recordv1.Container {
	c := rec.Containers[0]
	c.State, c.FinishedAt, c.Reason, c.TaskDeleted = exited, at(4), "Completed", true
	m.Bundles, m.Cgroups = map[string][]string{podID: nil}, nil
	m.Mounts = m.Mounts[:2]
	return c
}

func TestEachRuleFindsItsViolation(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(rec *Records, m *Machine)
		want   []string // "rule id"
	}{
		{"consistent", func(*Records, *Machine) {}, nil},
		{"consistent after the end", func(rec *Records, m *Machine) { end(rec, m) }, nil},
		{"consistent after the stop", func(rec *Records, m *Machine) {
			end(rec, m)
			s := rec.Sandboxes[0]
			s.State, s.NetworkAttached, s.ExitedAt = stopped, false, at(5)
			*m = Machine{
				State: m.State, Root: m.Root, Boot: boot, Mounts: []string{"/run/x/sandboxes/" + podID + "/shm"},
				FIFOs: m.FIFOs, PodFiles: m.PodFiles, Layered: true, Layers: m.Layers,
			}
		}, nil},
		{"consistent after a reboot", func(_ *Records, m *Machine) {
			*m = Machine{Boot: "boot-2", Attached: m.Attached, Addresses: m.Addresses}
		}, nil},
		{"consistent on mounted layers", func(_ *Records, m *Machine) {
			m.Lower = []string{"/lib/x/images/erofs/snapshots/3/fs"}
			m.Mounts = append(m.Mounts, m.Lower...)
		}, nil},
		{"consistent with a volume of an image", func(_ *Records, m *Machine) {
			m.Mounts = append(m.Mounts, "/lib/x/volumes/"+podID+"/"+other+"/root")
		}, nil},
		{"volume of an image without a pod", func(_ *Records, m *Machine) {
			m.Mounts = append(m.Mounts, "/lib/x/volumes/"+other+"/"+other+"/root")
		}, []string{"orphan.mount /lib/x/volumes/" + other + "/" + other + "/root"}},
		{"layer that nothing is on top of", func(_ *Records, m *Machine) {
			m.Lower = []string{"/lib/x/images/erofs/snapshots/3/fs"}
			m.Mounts = append(m.Mounts, "/lib/x/images/erofs/snapshots/4/fs")
		}, []string{"orphan.mount /lib/x/images/erofs/snapshots/4/fs"}},
		{"broken record", func(rec *Records, _ *Machine) { rec.Broken = map[string][]string{"sandboxes": {"k"}} }, []string{"record.unreadable k"}},
		{"bad sandbox id", func(rec *Records, _ *Machine) {
			rec.Releases = []*recordv1.NetworkRelease{{SandboxId: "short"}}
		}, []string{"release.id short"}},
		{"owed and recorded", func(rec *Records, _ *Machine) {
			rec.Releases = []*recordv1.NetworkRelease{{SandboxId: podID}}
		}, []string{"release.sandbox " + podID}},
		{"same name twice", func(rec *Records, m *Machine) {
			twin := proto.CloneOf(rec.Containers[0])
			twin.Id, twin.State, twin.Pid, twin.StartedAt = other, created, 0, nil
			rec.Containers = append(rec.Containers, twin)
			m.Layers = append(m.Layers, other)
		}, []string{"record.name " + other}},
		{"no metadata", func(rec *Records, _ *Machine) { rec.Sandboxes[0].Config.Metadata.Uid = "" }, []string{"sandbox.config " + podID}},
		{"no namespace", func(rec *Records, _ *Machine) {
			rec.Sandboxes[0].NetnsPath = ""
		}, []string{"sandbox.network " + podID, "sandbox.network " + podID}},
		{"host network", func(rec *Records, m *Machine) {
			s := rec.Sandboxes[0]
			s.Config.Linux = &criv1.LinuxPodSandboxConfig{SecurityContext: &criv1.LinuxSandboxSecurityContext{
				NamespaceOptions: &criv1.NamespaceOption{Network: criv1.NamespaceMode_NODE},
			}}
			s.NetnsPath, s.Namespaces, s.NetworkAttached, s.Ips = "", nil, false, nil
			m.Attached, m.Addresses = nil, nil
		}, nil},
		{"not an address", func(rec *Records, _ *Machine) { rec.Sandboxes[0].Ips = []string{"10.0.0"} }, []string{"sandbox.network " + podID}},
		{"stopped with network", func(rec *Records, m *Machine) {
			end(rec, m)
			rec.Sandboxes[0].State, rec.Sandboxes[0].ExitedAt = stopped, at(9)
			m.Bundles, m.Shims, m.Pins, m.Mounts = nil, nil, nil, nil
		}, []string{"sandbox.network " + podID}},
		{"unknown sandbox state", func(rec *Records, _ *Machine) { rec.Sandboxes[0].State = 9 }, []string{"sandbox.state " + podID}},
		{"lost sandbox", func(rec *Records, m *Machine) {
			end(rec, m)
			rec.Sandboxes = nil
			*m = Machine{}
		}, []string{"container.sandbox " + taskID}},
		{"finished before started", func(rec *Records, m *Machine) {
			end(rec, m).FinishedAt = at(1)
		}, []string{"container.times " + taskID}},
		{"no spec", func(rec *Records, _ *Machine) { rec.Containers[0].Spec = nil }, []string{"container.config " + taskID}},
		{"running without pid", func(rec *Records, m *Machine) {
			rec.Containers[0].Pid = 0
			m.Pids[0] = true
		}, []string{"container.state " + taskID}},
		{"running with an end", func(rec *Records, _ *Machine) { rec.Containers[0].FinishedAt = at(7) }, []string{"container.state " + taskID}},
		{"created with a start", func(rec *Records, _ *Machine) { rec.Containers[0].State = created }, []string{"container.state " + taskID}},
		{"preparing is never recorded", func(rec *Records, _ *Machine) {
			rec.Containers[0].State = recordv1.ContainerState_CONTAINER_STATE_PREPARING
		}, []string{"container.state " + taskID}},
		{"undecodable event", func(rec *Records, _ *Machine) { rec.Events[0].Event = nil }, []string{"outbox.event entry 1"}},
		{"undecodable envelope", func(rec *Records, _ *Machine) { rec.Events[0].Event.Envelope = []byte("?") }, []string{"outbox.event entry 1"}},
		{"topics differ", func(rec *Records, _ *Machine) { rec.Events[0].Event.Topic = "/tasks/oom" }, []string{"outbox.event entry 1"}},

		{"no bundle", func(_ *Records, m *Machine) { m.Bundles = nil }, []string{"missing.bundle " + podID}},
		{"no shim", func(_ *Records, m *Machine) { m.Shims = nil }, []string{"missing.shim " + podID}},
		{"dead shim that was noticed", func(rec *Records, m *Machine) {
			end(rec, m)
			rec.Sandboxes[0].ExitedAt = at(8)
			m.Shims = nil
		}, nil},
		{"no pin", func(_ *Records, m *Machine) { m.Mounts = m.Mounts[1:] }, []string{"missing.namespace " + podID}},
		{"no layer", func(_ *Records, m *Machine) { m.Layers = nil }, []string{"missing.layer " + taskID}},
		{"no process", func(_ *Records, m *Machine) { delete(m.Pids, 42) }, []string{"missing.process " + taskID}},
		{"no process while sandboxd is away", func(_ *Records, m *Machine) {
			delete(m.Pids, 42)
			m.Running = false
		}, nil},

		{"strange bundle and shim", func(_ *Records, m *Machine) {
			m.Bundles[other], m.Shims[other] = nil, []int{7}
		}, []string{"orphan.bundle " + other, "orphan.shim " + other}},
		{"rests of a deleted task", func(rec *Records, m *Machine) {
			before := *m
			end(rec, m)
			m.Bundles, m.Cgroups, m.Mounts = map[string][]string{podID: {taskID}}, before.Cgroups, before.Mounts
		}, []string{"orphan.bundle " + taskID, "orphan.cgroup " + taskID, "orphan.mount /run/x/shims/" + podID + "/containers/" + taskID + "/rootfs"}},
		{"strange objects", func(_ *Records, m *Machine) {
			m.Pins, m.Layers, m.FIFOs = append(m.Pins, other), append(m.Layers, other), append(m.FIFOs, other)
			m.Folders, m.PodFiles, m.Attached = append(m.Folders, other), append(m.PodFiles, other), append(m.Attached, other)
			m.RuntimeStates = []string{other, podID}
			m.Addresses["/net/10.0.0.9"] = other
			m.Rests = []string{"/run/x/shims/.new-1"}
		}, []string{
			"orphan.address /net/10.0.0.9", "orphan.rest /run/x/shims/.new-1", "orphan.namespaces " + other, "orphan.runtime-state " + other, "orphan.layer " + other,
			"orphan.fifos " + other, "orphan.folder " + other, "orphan.files " + other, "orphan.network " + other,
		}},
		{"owed network explains its address", func(rec *Records, m *Machine) {
			rec.Releases = []*recordv1.NetworkRelease{{SandboxId: other}}
			m.Attached = append(m.Attached, other)
			m.Addresses["/net/10.0.0.9"] = other
		}, nil},
		{"strange mounts", func(_ *Records, m *Machine) {
			m.Mounts = append(m.Mounts, "/lib/x/images/tmp/1", "/run/x/ns/"+other+"/net", "/run/x/deep/"+podID)
		}, []string{"orphan.mount /lib/x/images/tmp/1", "orphan.mount /run/x/ns/" + other + "/net", "orphan.mount /run/x/deep/" + podID}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			rec, m := world(t)
			tc.change(&rec, &m)
			var got []string
			for _, f := range append(Validate(rec), Compare(rec, m)...) {
				got = append(got, f.Rule+" "+f.ID)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}
