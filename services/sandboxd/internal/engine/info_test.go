package engine_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Operators' tools look into the verbose information by names that they know of other runtimes.
func TestVerboseInformation(t *testing.T) {
	n := start(t, newWorld(t), "boot")
	n.session(t, "gw")
	pod := runPod(t, n, "a")
	id := startContainer(t, n, pod, "c")

	var ofPod struct {
		RuntimeSpec        specs.Spec      `json:"runtimeSpec"`
		NetNamespaceClosed bool            `json:"netNamespaceClosed"`
		RuntimeOptions     map[string]any  `json:"runtimeOptions"`
		Config             json.RawMessage `json:"config"`
	}
	read := func() {
		t.Helper()
		info, err := n.Views.SandboxInfo(t.Context(), pod)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(info["info"]), &ofPod); err != nil {
			t.Fatal(err)
		}
	}
	read()
	want := []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/ns/" + pod}}
	if diff := cmp.Diff(want, ofPod.RuntimeSpec.Linux.Namespaces); diff != "" || ofPod.NetNamespaceClosed || len(ofPod.Config) < 3 {
		t.Errorf("information on the pod is %+v (-want +got):\n%s", ofPod, diff)
	}
	if _, ok := ofPod.RuntimeOptions["systemd_cgroup"]; !ok {
		t.Errorf("options of the runtime are %v", ofPod.RuntimeOptions)
	}

	info, err := n.Views.ContainerInfo(id)
	if err != nil {
		t.Fatal(err)
	}
	var ofContainer map[string]json.RawMessage
	if err := json.Unmarshal([]byte(info["info"]), &ofContainer); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{
		"sandboxID", "pid", "snapshotKey", "snapshotter", "runtimeType", "runtimeOptions", "runtimeSpec", "config", "privileged",
	} {
		if len(ofContainer[key]) == 0 {
			t.Errorf("information on the container has no %q: %s", key, info["info"])
		}
	}

	if err := n.Sandboxes.Stop(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	if read(); !ofPod.NetNamespaceClosed {
		t.Error("the network namespace of a stopped pod is not said to be closed")
	}
}
