//go:build integration

package controller_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/crisp-cri/crisp/services/sandboxd/internal/engine/port"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/pod"
	"github.com/crisp-cri/crisp/services/sandboxd/internal/shim/shimtest"
)

// criuRunc stands before the real runc and does what would need CRIU by itself: a checkpoint
// is a note of how it was asked for, and restoring runs the program anew.
const criuRunc = `#!/bin/sh
verb= image= work= leave= root= kept= skip=
for a in "$@"; do
	case $skip in
	image) image=$a; skip=; continue;;
	work) work=$a; skip=; continue;;
	root) root=$a; skip=; kept="$kept $a"; continue;;
	esac
	case $a in
	--image-path) skip=image;;
	--work-path) skip=work;;
	--leave-running) leave=1; flags="$flags $a";;
	--root) skip=root; kept="$kept $a";;
	checkpoint) verb=$a;;
	restore) verb=$a; kept="$kept run";;
	--*) flags="$flags $a"; kept="$kept $a";;
	*) kept="$kept $a"; id=$a;;
	esac
done
case $verb in
checkpoint)
	mkdir -p "$work"
	case $image in
	*/bad) echo "(00.1) Error (criu/cr-dump.c:7): cannot dump this" >"$work/dump.log"; exit 1;;
	esac
	mkdir -p "$image" && echo "$flags" >"$image/flags" || exit 1
	[ -n "$leave" ] || exec %[1]q --root "$root" kill "$id" KILL;;
restore)
	[ -e "$image/flags" ] || { mkdir -p "$work"; echo "(00.1) Error (criu/image.c:9): no images" >"$work/restore.log"; exit 1; }
	exec %[1]q $kept;;
*)
	exec %[1]q "$@";;
esac
`

// withCRIU is a handler whose runc can checkpoint.
func withCRIU(handler func(testing.TB, string) pod.Handler) func(testing.TB, string) pod.Handler {
	return func(t testing.TB, dir string) pod.Handler {
		h := handler(t, dir)
		path := filepath.Join(dir, "criu-runc")
		if err := os.WriteFile(path, fmt.Appendf(nil, criuRunc, h.BinaryName), 0o700); err != nil {
			t.Fatal(err)
		}
		h.BinaryName = path
		return h
	}
}

func TestCheckpointAndRestore(t *testing.T) {
	for name, handler := range shims {
		t.Run(name, func(t *testing.T) { testCheckpointAndRestore(t, newNode(t, withCRIU(handler))) })
	}
}

func testCheckpointAndRestore(t *testing.T, n *node) {
	t.Helper()
	ctx := t.Context()
	sb := n.sandbox()
	id, err := n.container(sb, port.IOSpec{}, "/bin/sleep", "1000")
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(n.dir, "image")
	if err := n.tasks.Checkpoint(ctx, sb, id, port.CheckpointSpec{ImagePath: image, FileLocks: true, OpenTCP: true}); err != nil {
		t.Fatal(err)
	}
	flags, err := os.ReadFile(filepath.Join(image, "flags"))
	if err != nil || !strings.HasSuffix(strings.TrimSpace(string(flags)), "--tcp-established --file-locks --leave-running") {
		t.Errorf("asked for with %q, %v", flags, err)
	}
	if st, err := n.tasks.State(ctx, sb, id, ""); err != nil || st.Status != "running" {
		t.Errorf("after the checkpoint: %+v, %v", st, err)
	}
	n.checkpointErrors(sb, id)
	if err := n.tasks.Checkpoint(ctx, sb, id, port.CheckpointSpec{ImagePath: image, Exit: true}); err != nil {
		t.Fatal(err)
	}
	if e, err := n.finish(sb, id); err != nil || e.Code != 137 {
		t.Errorf("ended by its checkpoint: %+v, %v", e, err)
	}
	n.restored(sb, image)
	if left, _ := filepath.Glob(filepath.Join(n.dir, "shims", sb, "containers", "*", "criu-work")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// checkpointErrors asks for checkpoints that cannot be.
func (n *node) checkpointErrors(sb, id string) {
	n.t.Helper()
	ctx := n.t.Context()
	err := n.tasks.Checkpoint(ctx, sb, id, port.CheckpointSpec{ImagePath: filepath.Join(n.dir, "bad")})
	if err == nil || !strings.Contains(err.Error(), id) || (n.handler.Name == "crisp" && !strings.Contains(err.Error(), "cannot dump this")) {
		n.t.Errorf("failed checkpoint: %v", err)
	}
	if err := n.tasks.Checkpoint(ctx, sb, id, port.CheckpointSpec{ImagePath: "relative"}); !errdefs.IsInvalidArgument(err) {
		n.t.Errorf("relative folder: %v", err)
	}
	if err := n.tasks.Checkpoint(ctx, sb, shimtest.ID(), port.CheckpointSpec{ImagePath: "/x"}); !errdefs.IsNotFound(err) {
		n.t.Errorf("unknown container: %v", err)
	}
}

// restored restores a container and ends it, and tries what goes wrong with that.
func (n *node) restored(sb, image string) {
	n.t.Helper()
	ctx := n.t.Context()
	for name, tc := range map[string]struct {
		image     string
		neverRuns bool
	}{
		"restored": {image: image}, "never started": {image: image, neverRuns: true}, "no images": {image: n.dir},
	} {
		id := shimtest.ID()
		stdio, err := n.io.Open(ctx, id, port.IOSpec{LogPath: filepath.Join(n.dir, id+".log")})
		if err != nil {
			n.t.Fatal(err)
		}
		_, err = n.tasks.Create(ctx, port.TaskSpec{
			SandboxID: sb, ContainerID: id, Handler: n.handler, Rootfs: n.mounts(), Stdio: stdio, Checkpoint: tc.image,
			Spec: shimtest.Spec(n.t, sb, id, false, "/bin/sh", "-c", "echo again; exit 4"),
		})
		if err != nil {
			n.t.Fatalf("%s: create: %v", name, err)
		}
		if st, err := n.tasks.State(ctx, sb, id, ""); err != nil || st.Status != "created" {
			n.t.Errorf("%s: %+v, %v", name, st, err)
		}
		if !tc.neverRuns {
			pid, err := n.tasks.Start(ctx, sb, id, "")
			if (err == nil) != (name == "restored") || (err == nil && pid == 0) {
				n.t.Errorf("%s: start: %d, %v", name, pid, err)
			}
			if err != nil && n.handler.Name == "crisp" && !strings.Contains(err.Error(), "no images") {
				n.t.Errorf("%s: start: %v", name, err)
			}
		}
		if name == "restored" {
			if e, err := n.finish(sb, id); err != nil || e.Code != 4 {
				n.t.Errorf("%s: %+v, %v", name, e, err)
			}
			if got := n.content(id, "stdout"); got != "again\n" {
				n.t.Errorf("%s: log %q", name, got)
			}
			continue
		}
		if _, err := n.tasks.Delete(ctx, sb, id, ""); err != nil {
			n.t.Errorf("%s: delete: %v", name, err)
		}
		if err := n.io.Close(ctx, id); err != nil {
			n.t.Error(err)
		}
	}
	if _, err := n.tasks.Create(ctx, port.TaskSpec{
		SandboxID: sb, ContainerID: shimtest.ID(), Handler: n.handler, Rootfs: n.mounts(), Checkpoint: "relative",
		Spec: shimtest.Spec(n.t, sb, shimtest.ID(), false, "/bin/true"),
	}); n.handler.Name == "crisp" && !errdefs.IsInvalidArgument(err) {
		n.t.Errorf("relative checkpoint: %v", err)
	}
}
