package engine_test

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	criv1 "k8s.io/cri-api/pkg/apis/runtime/v1"

	recordv1 "github.com/crisp-cri/crisp/proto/gen/crisp/record/v1"
)

const minute = time.Minute

// ops are the operations in the order of the steps.
func (w *world) ops() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, s := range w.steps {
		op, _, _ := strings.Cut(s, " ")
		out = append(out, op)
	}
	return out
}

// running fails the test if a container's process does not run.
func running(t *testing.T, n *node, ids ...string) {
	t.Helper()
	for _, id := range ids {
		p, err := n.w.proc(id)
		if err != nil {
			t.Fatal(err)
		}
		n.w.mu.Lock()
		if p.state != "running" {
			t.Errorf("container is %s", p.state)
		}
		n.w.mu.Unlock()
		if _, err := os.Lstat(filepath.Join(filepath.Dir(n.w.path), "containers", id)); err == nil {
			left, _ := filepath.Glob(filepath.Join(filepath.Dir(n.w.path), "containers", id, "*"))
			if len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		}
	}
}

func empty(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
}

// twoOfThem is a pod with two running containers.
func twoOfThem(t *testing.T, w *world) (n *node, sid string, ids []string) {
	t.Helper()
	n = start(t, w, "boot")
	n.session(t, "gw")
	sid = runPod(t, n, "a")
	return n, sid, []string{startContainer(t, n, sid, "one"), startContainer(t, n, sid, "two")}
}

func TestPodCheckpointIsOneCut(t *testing.T) {
	n, sid, ids := twoOfThem(t, newWorld(t))
	dir := t.TempDir()
	if err := n.Capture.Pod(t.Context(), sid, ids, dir, nil, minute); err != nil {
		t.Fatal(err)
	}
	want := []string{"tasks.pause", "tasks.pause", "tasks.checkpoint", "tasks.checkpoint", "tasks.resume", "tasks.resume"}
	if got := n.w.ops(); !slices.Equal(got, want) {
		t.Errorf("steps %v, want %v", got, want)
	}
	running(t, n, ids...)
	for _, topic := range []string{"/tasks/paused", "/tasks/checkpointed", "/tasks/resumed"} {
		if !slices.Contains(topics(t, n), topic) {
			t.Errorf("no event %s", topic)
		}
	}
	restorePod(t, n, dir)
}

// restorePod restores a pod and looks at what its container starts from.
func restorePod(t *testing.T, n *node, dir string) {
	t.Helper()
	configs := []*criv1.ContainerConfig{containerConfig("two"), containerConfig("one")}
	if err := n.Capture.CheckRestore(t.Context(), dir, "", nil, podConfig("b"), configs); err != nil {
		t.Fatal(err)
	}
	sid := runPod(t, n, "b")
	id, _, err := n.Containers.Prepare(t.Context(), "gw", sid, containerConfig("one"), dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Containers.Commit(t.Context(), id, nil); err != nil {
		t.Fatal(err)
	}
	if got := state(t, n, id).GetState(); got != recordv1.ContainerState_CONTAINER_STATE_CREATED {
		t.Errorf("restored container is %v", got)
	}
	if _, err := n.w.proc(id); !errdefs.IsNotFound(err) {
		t.Errorf("the restored process was made before the start: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(dir, "containers")); err != nil { // the caller may, from now on
		t.Fatal(err)
	}
	if err := n.Tasks.Start(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if got := n.w.applied[id]; !strings.HasPrefix(got, "changes of ") {
		t.Errorf("root file system has %q", got)
	}
	if got := n.w.applied["pages "+id]; !strings.HasPrefix(got, "pages of ") {
		t.Errorf("processes come from %q", got)
	}
	running(t, n, id)
}

func TestFailedPodCheckpointResumesAllAndLeavesNothing(t *testing.T) {
	for _, op := range []string{"tasks.pause", "tasks.checkpoint", "rootfs.diff"} {
		t.Run(op, func(t *testing.T) {
			n, sid, ids := twoOfThem(t, newWorld(t))
			dir := t.TempDir()
			n.w.set(op, errInjected)
			if err := n.Capture.Pod(t.Context(), sid, ids, dir, nil, minute); !errors.Is(err, errInjected) {
				t.Errorf("error = %v", err)
			}
			running(t, n, ids...)
			empty(t, dir)
		})
	}
}

func TestPodCheckpointEndsAtItsDeadlineWithAllResumed(t *testing.T) {
	n, sid, ids := twoOfThem(t, newWorld(t))
	dir := t.TempDir()
	n.w.slow = true
	err := n.Capture.Pod(t.Context(), sid, ids, dir, nil, 50*time.Millisecond)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error = %v", err)
	}
	running(t, n, ids...)
	empty(t, dir)
}

// A container that cannot be resumed now is resumed as soon as that works, and one that a
// killed process left paused is resumed by the next one.
func TestNoContainerStaysPaused(t *testing.T) {
	w := newWorld(t)
	n, sid, ids := twoOfThem(t, w)
	w.set("tasks.resume", errInjected)
	dir := t.TempDir()
	if err := n.Capture.Pod(t.Context(), sid, ids, dir, nil, minute); !errors.Is(err, errInjected) {
		t.Errorf("error = %v", err)
	}
	n.close()
	if err := os.WriteFile(filepath.Join(dir, "pod.dump"), nil, 0o600); err != nil { // as if cut off
		t.Fatal(err)
	}
	for _, id := range ids {
		if p, err := w.proc(id); err != nil || p.state != "paused" {
			t.Fatalf("process is %v, %v", p, err)
		}
	}
	w.set("tasks.resume", nil)
	n = start(t, w, "boot")
	eventually(t, "all are resumed", func() bool {
		for _, id := range ids {
			st, err := tasks{w}.State(t.Context(), sid, id, "")
			if err != nil || st.Status != "running" {
				return false
			}
			if _, err := os.Lstat(filepath.Join(filepath.Dir(w.path), "containers", id, "paused")); err == nil {
				return false
			}
		}
		return true
	})
	running(t, n, ids...)
	eventually(t, "the rest of the checkpoint is removed", func() bool {
		left, err := os.ReadDir(dir)
		return err == nil && len(left) == 0
	})
}

func TestContainerCheckpointIsAnArchive(t *testing.T) {
	n, _, ids := twoOfThem(t, newWorld(t))
	location := filepath.Join(t.TempDir(), "checkpoint.tar")
	if err := n.Capture.Container(t.Context(), ids[0], location, minute); err != nil {
		t.Fatal(err)
	}
	running(t, n, ids...)
	if st, err := os.Stat(location); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("archive: %v, %v", st, err)
	}
	f, err := os.Open(location)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var names []string
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, strings.TrimSuffix(h.Name, "/"))
	}
	slices.Sort(names)
	if want := []string{"checkpoint", "checkpoint/pages-1.img", "config.dump", "rootfs-diff.tar", "spec.dump"}; !slices.Equal(names, want) {
		t.Errorf("archive has %v, want %v", names, want)
	}
}

func TestCheckpointsThatCannotBe(t *testing.T) {
	n, sid, ids := twoOfThem(t, newWorld(t))
	created := createContainer(t, n, sid, "created")
	other := startContainer(t, n, runPod(t, n, "other"), "c")
	full, file := t.TempDir(), filepath.Join(t.TempDir(), "file")
	for _, path := range []string{filepath.Join(full, "x"), file} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pod := func(sandbox string, containers []string, dir string, options map[string]string) error {
		return n.Capture.Pod(t.Context(), sandbox, containers, dir, options, minute)
	}
	one := func(id, location string) error { return n.Capture.Container(t.Context(), id, location, minute) }
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		err  error
		want func(error) bool
	}{
		"unknown sandbox":        {pod("no", ids, dir, nil), errdefs.IsNotFound},
		"unknown container":      {pod(sid, []string{"no"}, dir, nil), errdefs.IsNotFound},
		"no container":           {pod(sid, nil, dir, nil), errdefs.IsInvalidArgument},
		"twice":                  {pod(sid, []string{ids[0], ids[0]}, dir, nil), errdefs.IsInvalidArgument},
		"of another sandbox":     {pod(sid, []string{other}, dir, nil), errdefs.IsInvalidArgument},
		"not running":            {pod(sid, []string{created}, dir, nil), errdefs.IsFailedPrecondition},
		"option":                 {pod(sid, ids, dir, map[string]string{"x": "y"}), errdefs.IsInvalidArgument},
		"folder not absolute":    {pod(sid, ids, "x", nil), errdefs.IsInvalidArgument},
		"folder not there":       {pod(sid, ids, filepath.Join(dir, "no"), nil), errdefs.IsNotFound},
		"folder not empty":       {pod(sid, ids, full, nil), errdefs.IsFailedPrecondition},
		"folder is a file":       {pod(sid, ids, file, nil), errdefs.IsInvalidArgument},
		"one, unknown":           {one("no", filepath.Join(dir, "a")), errdefs.IsNotFound},
		"one, not running":       {one(created, filepath.Join(dir, "a")), errdefs.IsFailedPrecondition},
		"one, not absolute":      {one(ids[0], "a"), errdefs.IsInvalidArgument},
		"one, there already":     {one(ids[0], file), errdefs.IsAlreadyExists},
		"one, folder not there":  {one(ids[0], filepath.Join(dir, "no", "a")), errdefs.IsFailedPrecondition},
		"one, folder not normal": {one(ids[0], "/proc/self/a"), errdefs.IsFailedPrecondition},
	} {
		if !tc.want(tc.err) {
			t.Errorf("%s: %v", name, tc.err)
		}
	}
	n.w.set("criu", errdefs.ErrFailedPrecondition)
	if err := pod(sid, ids, dir, nil); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without criu: %v", err)
	}
	if steps := n.w.ops(); len(steps) > 0 {
		t.Errorf("steps of refused checkpoints: %v", steps)
	}
	running(t, n, ids...)
	empty(t, dir)
}

func TestRestoreIsRefusedForWhatDoesNotFit(t *testing.T) {
	n, sid, ids := twoOfThem(t, newWorld(t))
	dir := t.TempDir()
	if err := n.Capture.Pod(t.Context(), sid, ids, dir, nil, minute); err != nil {
		t.Fatal(err)
	}
	check := func(dir, handler string, options map[string]string, change func(c []*criv1.ContainerConfig) []*criv1.ContainerConfig) error {
		configs := change([]*criv1.ContainerConfig{containerConfig("one"), containerConfig("two")})
		return n.Capture.CheckRestore(t.Context(), dir, handler, options, podConfig("b"), configs)
	}
	same := func(c []*criv1.ContainerConfig) []*criv1.ContainerConfig { return c }
	with := func(change func(*criv1.ContainerConfig)) error {
		return check(dir, "", nil, func(c []*criv1.ContainerConfig) []*criv1.ContainerConfig { change(c[1]); return c })
	}
	for name, tc := range map[string]struct {
		err  error
		want func(error) bool
	}{
		"not there":       {check(filepath.Join(dir, "no"), "", nil, same), errdefs.IsNotFound},
		"no checkpoint":   {check(t.TempDir(), "", nil, same), errdefs.IsFailedPrecondition},
		"unknown handler": {check(dir, "no", nil, same), errdefs.IsNotFound},
		"option":          {check(dir, "", map[string]string{"x": "y"}, same), errdefs.IsInvalidArgument},
		"one missing": {
			check(dir, "", nil, func(c []*criv1.ContainerConfig) []*criv1.ContainerConfig { return c[:1] }),
			errdefs.IsInvalidArgument,
		},
		"one too many": {check(dir, "", nil, func(c []*criv1.ContainerConfig) []*criv1.ContainerConfig {
			return append(c, containerConfig("three"))
		}), errdefs.IsInvalidArgument},
		"one twice": {
			check(dir, "", nil, func(c []*criv1.ContainerConfig) []*criv1.ContainerConfig { return append(c, c[0]) }),
			errdefs.IsInvalidArgument,
		},
		"command":     {with(func(c *criv1.ContainerConfig) { c.Command = []string{"other"} }), errdefs.IsInvalidArgument},
		"args":        {with(func(c *criv1.ContainerConfig) { c.Args = []string{"other"} }), errdefs.IsInvalidArgument},
		"folder":      {with(func(c *criv1.ContainerConfig) { c.WorkingDir = "/other" }), errdefs.IsInvalidArgument},
		"terminal":    {with(func(c *criv1.ContainerConfig) { c.Tty = true }), errdefs.IsInvalidArgument},
		"environment": {with(func(c *criv1.ContainerConfig) { c.Envs = []*criv1.KeyValue{{Key: "A"}} }), errdefs.IsInvalidArgument},
		"mount":       {with(func(c *criv1.ContainerConfig) { c.Mounts = []*criv1.Mount{{ContainerPath: "/m"}} }), errdefs.IsInvalidArgument},
		"user": {with(func(c *criv1.ContainerConfig) {
			c.Linux = &criv1.LinuxContainerConfig{SecurityContext: &criv1.LinuxContainerSecurityContext{RunAsUser: &criv1.Int64Value{Value: 7}}}
		}), errdefs.IsInvalidArgument},
		"image": {with(func(c *criv1.ContainerConfig) { c.Image.Image = "absent" }), errdefs.IsNotFound},
	} {
		if !tc.want(tc.err) {
			t.Errorf("%s: %v", name, tc.err)
		}
	}
}
